"""llama.cpp by its low-level interface: flash attention on, forks by ``llama_memory_seq_cp``, one ``llama_decode`` a step for all lanes.

Shared prefixes live in one unified cache; unrelated lanes each get a stream of their own, which spares them each other's keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp as llama
import numpy as np
from llama_cpp._logger import set_verbose
from protocol import WARM_STEPS, Command, lane_prompts, serve, tokens

BATCH_TOKENS = 2048
SMALL_BATCH_TOKENS = 512
ROOM = 256
"""Tokens that a lane may grow beyond its prompt."""


class Context:
    """A cache of a kind and size, and the decoding in it."""

    def __init__(self, model: Any, *, sequences: int, cells: int, is_unified: bool, threads: int) -> None:
        parameters = llama.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max, parameters.kv_unified = cells, sequences, is_unified
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, SMALL_BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = 1
        parameters.no_perf = True
        self._context = llama.llama_init_from_model(model, parameters)
        if not self._context:
            raise MemoryError(f"llama.cpp made no context of {cells} cells")
        self._memory = llama.llama_get_memory(self._context)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def clear(self) -> None:
        """Forget everything."""
        llama.llama_memory_clear(self._memory, True)

    def fork(self, sequence: int) -> None:
        """Give ``sequence`` all that sequence 0 has."""
        llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def cut(self, sequence: int, length: int) -> None:
        """Forget what ``sequence`` holds from position ``length`` on."""
        llama.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def prefill(self, prompt: Sequence[int], sequence: int) -> int:
        """Process a prompt; the likeliest next token."""
        for first in range(0, len(prompt), BATCH_TOKENS):
            piece = prompt[first : first + BATCH_TOKENS]
            wanted = [first + index == len(prompt) - 1 for index in range(len(piece))]
            self._decode(piece, range(first, first + len(piece)), [sequence] * len(piece), wanted)
        return self._likeliest(-1)

    def step(self, last: Sequence[int], position: int) -> list[int]:
        """One token for each sequence from 0 on; the likeliest next ones."""
        lanes = len(last)
        self._decode(last, [position] * lanes, range(lanes), [True] * lanes)
        return [self._likeliest(lane) for lane in range(lanes)]

    def close(self) -> None:
        """Free the memory."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)

    def _decode(
        self, piece: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[bool]
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(piece)
        for index, token in enumerate(piece):
            batch.token[index], batch.pos[index], batch.logits[index] = token, positions[index], wanted[index]
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequences[index]
        status = llama.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")

    def _likeliest(self, row: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


class Llama:
    """A model, and for each case the context with its prompts processed, kept from round to round."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        set_verbose(False)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(options["model"].encode(), llama.llama_model_default_params())
        if not self._model:
            raise FileNotFoundError(options["model"])
        self._threads = options["threads"]
        self._single = Context(self._model, sequences=1, cells=8192, is_unified=True, threads=self._threads)
        self._prepared: dict[tuple[int, int, bool], Context] = {}

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {
            "version": llama.__version__,
            "threads": self._threads,
            "system": llama.llama_print_system_info().decode(),
        }

    def prefill(self, context: int, salt: int) -> dict[str, float]:
        """A prompt to its first token."""
        prompt = tokens(context, salt)
        self._single.clear()
        started = time.perf_counter()
        self._single.prefill(prompt, 0)
        return {"seconds": time.perf_counter() - started}

    def decode(self, lanes: int, context: int, is_shared: bool, steps: int) -> dict[str, float]:
        """Steps of all lanes together, after their prompts."""
        cache = self._prepare(lanes, context, is_shared)
        last = [prompt[-1] for prompt in lane_prompts(lanes, context, is_shared)]
        for step in range(WARM_STEPS):
            last = cache.step(last, context + step)
        started = time.perf_counter()
        for step in range(steps):
            last = cache.step(last, context + WARM_STEPS + step)
        return {"seconds": time.perf_counter() - started, "tokens": lanes * steps}

    def _prepare(self, lanes: int, context: int, is_shared: bool) -> Context:
        """A cache in which every lane stands after its first ``context`` tokens."""
        key = (lanes, context, is_shared)
        if key in self._prepared:
            for lane in range(lanes):
                self._prepared[key].cut(lane, context)
            return self._prepared[key]
        cells = context + lanes * ROOM if is_shared else lanes * (context + ROOM)
        cache = Context(
            self._model, sequences=lanes, cells=cells, is_unified=is_shared or lanes == 1, threads=self._threads
        )
        for lane, prompt in enumerate(lane_prompts(1 if is_shared else lanes, context, is_shared)):
            cache.prefill(prompt[:-1], lane)
        if is_shared:
            for lane in range(1, lanes):
                cache.fork(lane)
        self._prepared[key] = cache
        return cache


def load(options: Mapping[str, Any]) -> dict[str, Command]:
    """Load, and run each kind of request once."""
    engine = Llama(options)
    engine.prefill(64, 0)
    return {"describe": engine.describe, "prefill": engine.prefill, "decode": engine.decode}


if __name__ == "__main__":
    serve(load)
