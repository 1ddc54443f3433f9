"""A transformers model that advances states: the one place that runs forward passes.

One lock, one pass at a time. A pass serves any number of lanes, prefill and decode alike. Every append is a reservation that is committed
only when all layers have run.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.ids import ObjectId
from forkpoint.llm.engines.base import Exactness, Logits, PrefillProgress, TextCodec, no_progress
from forkpoint.llm.engines.codec import TransformersCodec
from forkpoint.llm.engines.eager import EagerExecutor
from forkpoint.llm.engines.identity import machine_record, state_record
from forkpoint.llm.engines.inspection import context_limit, end_tokens, find_groups, learned_positions
from forkpoint.llm.engines.numerics import Numerics
from forkpoint.llm.engines.replacement import Replacements, replace_modules
from forkpoint.llm.engines.selftest import Findings, FindingsCache, measure
from forkpoint.llm.engines.sources import LoadedModel
from forkpoint.llm.engines.weights import WeightsWatch, digest_parameters, weights_changed
from forkpoint.llm.kernels.native import build_identity, instruction_set
from forkpoint.llm.resident.base import State, beyond_context
from forkpoint.llm.resident.paged import PagedState, PagedStrategy
from forkpoint.llm.resident.pieces import PIECE_ROWS, cut_pieces
from forkpoint.llm.resident.plan import MAX_ROWS, DecodePlan, Executor, ProgramExecutor
from forkpoint.llm.resident.program import Program, build_program
from forkpoint.llm.resident.reservation import PagedReservation
from forkpoint.llm.resident.residency import Residency
from forkpoint.llm.resident.routes import Step, lay_out
from forkpoint.llm.resident.tracing import Refusal
from forkpoint.state.canonical import Record
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.prefix import CHUNK_TOKENS

MIN_EAGER_ROWS: Final = 4
"""Rows of the smallest pass through transformers: a library's dense layers of 1 to 3 rows take other code paths."""

_SELFTEST_TOKENS: Final = CHUNK_TOKENS + 48
_SELFTEST_PAGES: Final = 64
"""More than a self-test uses; with less it may have to leave neighbours out."""


@final
class TransformersRuntime:
    """A model, its pages, its plan and its identity. Lives as long as anything refers to it."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        parameters: ObjectId,
        max_context: int,
        known: FindingsCache,
        residency: Residency,
    ) -> None:
        model = loaded.model
        self.name = loaded.name
        self._model = model
        self._lock = threading.Lock()
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.max_context = max_context
        self.rolls_over = learned_positions(model)
        self.codec: TextCodec = TransformersCodec(loaded.tokenizer, end_tokens(model))
        self.groups = find_groups(model)
        self.replacements: Replacements = replace_modules(model)
        room = max(max_context, min(context_limit(model), _SELFTEST_TOKENS))
        self.strategy = PagedStrategy(
            self.groups,
            max_context=room,
            device=model.device,
            page_size=residency.page_size,
            pool_bytes=residency.pool_bytes,
        )
        self._numerics = Numerics.current()
        self._parameters = parameters
        self._watch = WeightsWatch(model)
        self.residency = residency
        self._is_invariant = False
        self.plan = DecodePlan(self._build_executor, self.strategy.pages, lanes=residency.lanes, policy=residency.plan)
        state, machine = state_record(model, self.codec, self.groups, parameters), self._machine()
        self.findings = self._measured(known, self._findings_key(state, machine), room)
        self._is_invariant = self.findings.is_invariant
        self.fingerprint = self._fingerprint(state, machine)
        self.exactness = Exactness(claim=self.findings.claim, reasons=self.findings.reasons)

    @property
    def lanes(self) -> int:
        """Continuations that one decode step serves: 1 where a row's bits would depend on its neighbours."""
        return self.plan.lanes if self._is_invariant else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers as they are held."""
        tensors = {id(each): each for each in (*self._model.parameters(), *self._model.buffers())}
        return sum(each.nbytes for each in tensors.values())

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

    # ---- what continuations ask for ----

    def advance(self, state: State, tokens: Sequence[int], progress: PrefillProgress = no_progress) -> State:
        """Process tokens in pieces that end at absolute multiples of 256."""
        return self.advance_many([(state, tokens)], progress)[0]

    def advance_many(
        self, appends: Sequence[tuple[State, Sequence[int]]], progress: PrefillProgress = no_progress
    ) -> list[State]:
        """Process tokens after each of several states, pieces of different lanes in shared passes; progress counts tokens of all."""
        for state, tokens in appends:
            self.check_tokens(tokens)
            self._check_room(state, len(tokens))
        states = [state for state, _ in appends]
        done, total = 0, sum(len(tokens) for _, tokens in appends)
        for pieces in cut_pieces([(state.length, len(tokens)) for state, tokens in appends], shared=self._is_invariant):
            lanes = []
            for index, start, stop in pieces:
                base = appends[index][0].length
                lanes.append((states[index], appends[index][1][start - base : stop - base]))
            advanced, _ = self.run(lanes, output="none")
            for (index, start, stop), state in zip(pieces, advanced, strict=True):
                states[index] = state
                done += stop - start
            progress(done, total)
        return states

    def step(self, state: State, token: int) -> tuple[State, Logits]:
        """Process one token and return ``[vocabulary]`` logits."""
        return self.step_many([(state, token)])[0]

    def step_many(self, steps: Sequence[tuple[State, int]]) -> list[tuple[State, Logits]]:
        """One token of each of several states; in passes of at most ``lanes``."""
        self.check_tokens([token for _, token in steps])
        for state, _ in steps:
            self._check_room(state, 1)
        found: list[tuple[State, Logits]] = []
        for first in range(0, len(steps), self.lanes):
            lanes = [(state, (token,)) for state, token in steps[first : first + self.lanes]]
            states, logits = self.run(lanes, output="last")
            found.extend(zip(states, logits, strict=True))
        return found

    def evaluate(self, state: State, alternatives: Sequence[Sequence[int]]) -> list[Logits]:
        """Logits after every token of every alternative; an alternative's bits do not depend on the others.

        In passes of at most 256 rows where rows are found to have the same bits in company as alone, else one pass an alternative.
        """
        if not all(alternatives):
            raise InvalidInput("an alternative needs at least one token", code="empty")
        self.check_tokens([token for tokens in alternatives for token in tokens])
        found: list[Logits] = []
        while len(found) < len(alternatives):
            found.extend(self._evaluate(_paged(state), alternatives[len(found) :]))
        return found

    # ---- inside, and for the self-test ----

    def run(
        self, lanes: Sequence[tuple[State, Sequence[int]]], *, output: str, threads: int | None = None
    ) -> tuple[list[State], Logits]:
        """One pass that appends tokens to several states, all or nothing.

        Args:
            output: whose logits are wanted: ``none``, ``last`` (of each lane) or ``all`` rows.
            threads: instead of those of the load.

        Raises:
            CapacityExceeded: ``capacity.plan`` with ``reason`` for what the plan cannot serve, or as ``PagedStrategy.reserve_many``.
            Corrupt: ``corrupt.logits``. Incompatible: ``incompatible.weights`` or ``incompatible.settings``.
        """
        with self._lock:
            self._watch.check()
            reservations = self.strategy.reserve_many([(_paged(state), len(tokens)) for state, tokens in lanes])
            try:
                step = self._lay_out([tokens for _, tokens in lanes], reservations)
                logits = self._serve(step, _wanted(step, output), threads)
            except BaseException:
                for reservation in reservations:
                    reservation.abort()
                raise
            return [reservation.commit(is_invariant=self._is_invariant) for reservation in reservations], logits

    def _evaluate(self, state: PagedState, alternatives: Sequence[Sequence[int]]) -> list[Logits]:
        """Logits of as many alternatives, from the first on, as fit one pass."""
        with self._lock:
            self._watch.check()
            batch = alternatives[: self._num_together(state, alternatives)]
            owner, branches = self.strategy.reserve_branches(state, [len(tokens) for tokens in batch])
            try:
                step = self._lay_out(batch, branches)
                logits = self._serve(step, step.live_rows(), None)
            finally:
                owner.abort()
        return [logits[segment.row : segment.row + segment.num_rows] for segment in step.segments]

    def _num_together(self, state: PagedState, alternatives: Sequence[Sequence[int]]) -> int:
        if not self._is_invariant:
            return 1
        lengths = np.array([len(tokens) for tokens in alternatives])
        in_rows = int(np.searchsorted(np.cumsum(lengths), PIECE_ROWS, side="right"))
        in_pages = self.strategy.num_fitting_branches(state, lengths[: max(1, in_rows)].tolist())
        return max(1, min(in_rows, in_pages))

    def _lay_out(self, tokens: Sequence[Sequence[int]], reservations: Sequence[PagedReservation]) -> Step:
        min_rows = 1 if self.plan.executor == ProgramExecutor.name else MIN_EAGER_ROWS
        return lay_out(list(zip(tokens, reservations, strict=True)), min_rows=min_rows)

    def _serve(self, step: Step, output_rows: NDArray[np.int64], threads: int | None) -> Logits:
        refusal = self.plan.find_refusal(step, self.strategy.pages)
        if refusal is not None and (refusal.code != "pages" or self.plan.rebind(self.strategy.pages) is not None):
            raise CapacityExceeded(
                f"the decode plan cannot serve this: {refusal.why}", code="plan", reason=refusal.code
            )
        with self._numerics.held(self._model.device, threads=threads) as num_threads:
            return self.plan.run(step, output_rows, threads=num_threads)

    def _build_executor(self, pages: Sequence[Tensor]) -> tuple[Executor, Refusal | None]:
        if not self.residency.native:
            return self._eager(pages), Refusal(
                code="asked", operation="", why="it was loaded to run through transformers"
            )
        with torch.no_grad():
            built = build_program(
                self._model,
                self.groups,
                pages,
                page_tokens=self.strategy.page_size,
                max_context=self.strategy.max_context,
                max_rows=MAX_ROWS,
            )
        return (ProgramExecutor(built), None) if isinstance(built, Program) else (self._eager(pages), built)

    def _eager(self, pages: Sequence[Tensor]) -> EagerExecutor:
        return EagerExecutor(self._model, self.groups, pages)

    def _check_room(self, state: State, num_tokens: int) -> None:
        if state.length + num_tokens > self.max_context:
            raise beyond_context(state.length + num_tokens, self.max_context)

    def _measured(self, known: FindingsCache, key: Record, max_tokens: int) -> Findings:
        found = known.find(key)
        if found is None:
            found = measure(self, max_tokens)
            known.put(key, found)
        return found

    def _findings_key(self, state: Record, machine: Record) -> Record:
        """Everything that decides what a self-test finds, or what it can try."""
        pages = min(self.strategy.ledger.pool.num_pages, _SELFTEST_PAGES)
        residency: Record = {"lanes": self.plan.lanes, "page_tokens": self.strategy.page_size, "pages": pages}
        return {
            "build": build_identity(),
            "machine": machine,
            "node": platform.node(),
            "residency": residency,
            "state": state,
        }

    def _machine(self) -> Record:
        """The part of the execution identity that is known before anything ran."""
        return {
            **machine_record(self._model.device),
            "context": self.max_context if self.rolls_over else None,
            "end_tokens": sorted(self.codec.end_tokens),
            "executor": self.plan.executor,
            "kernels": instruction_set(),
            "settings": self._numerics.to_record(with_threads=True),
        }

    def _fingerprint(self, state: Record, machine: Record) -> Fingerprint:
        execution: Record = {
            **machine,
            "probe": self.findings.probe,
            "rows": {"piece": None if self._is_invariant else PIECE_ROWS},
            "settings": self._numerics.to_record(with_threads=not self.findings.are_threads_alike),
        }
        return Fingerprint(state=state, execution=execution)


def _wanted(step: Step, output: str) -> NDArray[np.int64]:
    if output == "none":
        return np.empty(0, dtype=np.int64)
    return step.last_rows() if output == "last" else step.live_rows()


def _paged(state: State) -> PagedState:
    assert isinstance(state, PagedState)
    return state
