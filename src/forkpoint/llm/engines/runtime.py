"""A transformers model that advances states: the one place that runs forward passes.

One lock, one pass at a time. Every append is a reservation that is committed only when all layers have run.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forkpoint.errors import InvalidInput
from forkpoint.ids import ObjectId, digest_of
from forkpoint.llm.engines.base import Exactness, Logits, PrefillProgress, TextCodec, no_progress
from forkpoint.llm.engines.codec import TransformersCodec
from forkpoint.llm.engines.identity import machine_record, state_record
from forkpoint.llm.engines.inspection import context_limit, find_groups, learned_positions
from forkpoint.llm.engines.numerics import Numerics
from forkpoint.llm.engines.rows import STEP_KEYWORD, Step, lay_out
from forkpoint.llm.engines.sources import LoadedModel
from forkpoint.llm.engines.weights import WeightsWatch, digest_parameters, weights_changed
from forkpoint.llm.resident.base import GroupSpec, Reservation, State, Strategy, beyond_context
from forkpoint.state.canonical import Record
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.prefix import CHUNK_TOKENS

MIN_ROWS: Final = 4
"""Rows of the smallest forward pass: fewer are padded, because dense layers of 1 to 3 rows take other code paths."""

_PIECE_ROWS: Final = CHUNK_TOKENS
_HEAD_ROWS: Final = (32, 16, 8, 4)
_PROBE_TOKENS: Final = CHUNK_TOKENS + 44
_PROBE_ALTERNATIVES: Final = (1, 2, 5, 9, 17, 33, 64, 120)

MakeStrategy = Callable[[Sequence[GroupSpec], int, torch.device], Strategy]


@final
class TransformersRuntime:
    """A model, its strategy and its identity. Lives as long as anything refers to it."""

    def __init__(self, loaded: LoadedModel, *, parameters: ObjectId, max_context: int, strategy: MakeStrategy) -> None:
        model = loaded.model
        self.name = loaded.name
        self._model = model
        self._lock = threading.Lock()
        self._head_rows = _block_head(model)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.max_context = max_context
        self.rolls_over = learned_positions(model)
        codec = TransformersCodec(loaded.tokenizer, _end_tokens(model))
        self.codec: TextCodec = codec
        self.groups = find_groups(model)
        self.strategy = strategy(self.groups, max_context, model.device)
        self._probe_strategy = strategy(self.groups, context_limit(model), model.device)
        self._numerics = Numerics.current()
        self._parameters = parameters
        self._watch = WeightsWatch(model)
        self._are_rows_alike: bool | None = None
        self.fingerprint = self._fingerprint(state_record(model, codec, self.groups, parameters))
        self.exactness = self._exactness()

    @contextmanager
    def between_passes(self) -> Iterator[None]:
        """No pass runs while the block does."""
        with self._lock:
            yield

    def check_weights(self) -> None:
        """Compare the parameters' version counters with those at load."""
        self._watch.check()

    def verify_weights(self) -> None:
        """Recompute the digest of the parameters and compare it with the one at load."""
        self._watch.check()
        if digest_parameters(self._model) != self._parameters:
            raise weights_changed("found by digest")

    def advance(self, state: State, tokens: Sequence[int], progress: PrefillProgress = no_progress) -> State:
        """Process tokens in pieces that end at absolute multiples of 256."""
        self.check_tokens(tokens)
        if state.length + len(tokens) > self.max_context:
            raise beyond_context(state.length + len(tokens), self.max_context)
        return self._advance(state, tokens, progress)

    def _advance(self, state: State, tokens: Sequence[int], progress: PrefillProgress = no_progress) -> State:
        done = 0
        while done < len(tokens):
            size = min(len(tokens) - done, _PIECE_ROWS - state.length % _PIECE_ROWS)
            piece = tokens[done : done + size]
            state, _ = self._append(state, piece, room=len(tokens) - done - size, run=self._hidden)
            done += size
            progress(done, len(tokens))
        return state

    def step(self, state: State, token: int) -> tuple[State, Logits]:
        """Process one token and return ``[vocabulary]`` logits."""
        self.check_tokens((token,))
        return self._step(state, token)

    def _step(self, state: State, token: int) -> tuple[State, Logits]:
        state, logits = self._append(state, (token,), room=0, run=self._logits)
        return state, logits[0]

    def evaluate(self, state: State, alternatives: Sequence[Sequence[int]]) -> list[Logits]:
        """Logits after every token of every alternative; an alternative's bits do not depend on the others.

        In passes of at most 256 rows where rows are found to have the same bits in company as alone, else one pass an alternative.
        """
        if not all(alternatives):
            raise InvalidInput("an alternative needs at least one token", code="empty")
        self.check_tokens([token for tokens in alternatives for token in tokens])
        shares = len(alternatives) > 1 and self._shares_passes()
        found: list[Logits] = []
        for batch in _batches(alternatives, _PIECE_ROWS if shares else 1):
            found.extend(self._evaluate_batch(state, batch))
        return found

    def _shares_passes(self) -> bool:
        """Whether rows have the same bits in a pass of many as in one of few. Measured once, when it is first asked.

        Not so where the library's product splits its sums by the number of rows, or where an expert sees few of them.
        """
        if self._are_rows_alike is None:
            lengths = [length for length in _PROBE_ALTERNATIVES if length <= self.max_context]
            probes = [[(length * 31 + place * 7) % self.vocabulary for place in range(length)] for length in lengths]
            empty = self.strategy.empty()
            together = self._evaluate_batch(empty, probes)
            self._are_rows_alike = all(
                self._evaluate_batch(empty, [tokens])[0].tobytes() == rows.tobytes()
                for tokens, rows in zip(probes, together, strict=True)
            )
        return self._are_rows_alike

    def _evaluate_batch(self, state: State, batch: Sequence[Sequence[int]]) -> list[Logits]:
        with self._lock:
            self._watch.check()
            owner, branches = state.reserve_branches([len(tokens) for tokens in batch])
            try:
                step = lay_out(list(zip(batch, branches, strict=True)), min_rows=MIN_ROWS)
                logits = self._logits(step)
            finally:
                owner.abort()
        return [logits[segment.row : segment.row + len(segment.tokens)] for segment in step.segments]

    def _append(
        self, state: State, tokens: Sequence[int], *, room: int, run: Callable[[Step], Logits]
    ) -> tuple[State, Logits]:
        with self._lock:
            self._watch.check()
            reservation: Reservation = state.reserve(len(tokens), room=room)
            try:
                logits = run(lay_out([(tokens, reservation)], min_rows=MIN_ROWS))
            except BaseException:
                reservation.abort()
                raise
            return reservation.commit(), logits

    def _hidden(self, step: Step) -> Logits:
        tokens, positions = step.inputs(self._model.device)
        with self._numerics.held(self._model.device):
            self._model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **{STEP_KEYWORD: step})
        return np.empty((0, self.vocabulary), dtype=np.float32)

    def _logits(self, step: Step) -> Logits:
        """Logits of every row of a step that belongs to a segment, ``[rows vocabulary]``."""
        tokens, positions = step.inputs(self._model.device)
        num_live = sum(len(segment.tokens) for segment in step.segments)
        keep = {"logits_to_keep": torch.arange(num_live, device=tokens.device)} if self._keeps_rows else {}
        with self._numerics.held(self._model.device):
            out = self._model(input_ids=tokens, position_ids=positions, use_cache=False, **keep, **{STEP_KEYWORD: step})
        return np.asarray(out.logits[0, :num_live].float().cpu().numpy())

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises InvalidInput ``invalid_input.token`` for an id outside the vocabulary."""
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocabulary:
                raise InvalidInput(
                    f"token {token!r} is not an id in [0, {self.vocabulary})",
                    code="token",
                    token=str(token),
                    vocabulary=self.vocabulary,
                )

    def _fingerprint(self, state: Record) -> Fingerprint:
        execution: Record = {
            **machine_record(self._model.device),
            "context": self.max_context if self.rolls_over else None,
            "end_tokens": sorted(self.codec.end_tokens),
            "probe": self._probe(),
            "rows": {"head": self._head_rows, "min": MIN_ROWS, "piece": _PIECE_ROWS},
            "settings": self._numerics.to_record(),
        }
        return Fingerprint(state=state, execution=execution)

    def _exactness(self) -> Exactness:
        if self._probe() != self.fingerprint.execution["probe"]:
            why = "a fixed run gave other bits when it was repeated: this machine or build does not compute deterministically"
            return Exactness(claim="bytes", reasons=(why,))
        return Exactness(
            claim="continuation",
            reasons=(
                "a fixed run repeats bit for bit: restored and forked state goes on as if it had never stopped",
                "attention reduces in an order that depends on the number of query rows, so prefill and decode may differ in bits",
            ),
        )

    def _probe(self) -> ObjectId:
        """Digest of the bits of a fixed run: a prefill of a whole piece and a part of one, three steps, their keys and values.

        Runs in memory of its own, as long as the model allows, so that it does not depend on ``max_context``.
        """
        length = min(_PROBE_TOKENS, self._probe_strategy.page_size - 3)
        state = self._advance(
            self._probe_strategy.empty(), [1 + token % (self.vocabulary - 1) for token in range(length)]
        )
        parts: list[bytes | memoryview | bytearray] = []
        for token in (1, 2, 3):
            state, logits = self._step(state, token % self.vocabulary)
            parts.append(logits.tobytes())
        for group in range(len(self.groups)):
            keys, values = state.slab_pieces(group, 0, state.length)
            parts.extend((*keys, *values))
        return digest_of(parts)


def _batches(alternatives: Sequence[Sequence[int]], max_rows: int) -> list[list[Sequence[int]]]:
    batches: list[list[Sequence[int]]] = []
    rows = 0
    for tokens in alternatives:
        if not batches or rows + len(tokens) > max_rows:
            batches.append([])
            rows = 0
        batches[-1].append(tokens)
        rows += len(tokens)
    return batches


def _end_tokens(model: Any) -> list[int]:
    end = getattr(model.generation_config, "eos_token_id", None)
    if end is None:
        end = getattr(model.config.get_text_config(), "eos_token_id", None)
    return [] if end is None else [int(token) for token in (end if isinstance(end, list) else [end])]


def _block_head(model: Any) -> int:
    """Make the output layer run in blocks of a row count within which every row has the same bits; returns the block size.

    Measured here for this layer's own weights: a row's logits must not depend on how many rows are asked for at once.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return 0
    size = _agreeing_rows(head)

    def forward(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        rows = flat.shape[0]
        padded = F.pad(flat, (0, 0, 0, -rows % MIN_ROWS))
        blocks = [
            F.linear(padded[start : start + size], head.weight, head.bias) for start in range(0, len(padded), size)
        ]
        return torch.cat(blocks)[:rows].reshape(*hidden.shape[:-1], -1)

    head.forward = forward  # type: ignore[method-assign, assignment]
    return size


def _agreeing_rows(head: nn.Linear) -> int:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(max(_HEAD_ROWS), head.in_features, generator=generator).to(
        head.weight.device, head.weight.dtype
    )
    for size in _HEAD_ROWS:
        if _rows_agree(head, sample[:size]):
            return size
    return MIN_ROWS


def _rows_agree(head: nn.Linear, sample: Tensor) -> bool:
    """Whether every row of ``sample`` has the same bits in passes of every multiple of 4 rows, at the front of them and at the end."""
    whole = F.linear(sample, head.weight, head.bias)
    for count in range(MIN_ROWS, len(sample), MIN_ROWS):
        front, end = sample[:count], sample[-count:]
        if not torch.equal(F.linear(front, head.weight, head.bias), whole[:count]):
            return False
        if not torch.equal(F.linear(end, head.weight, head.bias), whole[-count:]):
            return False
    return True
