"""Forkpoint itself, in a process of its own like every peer."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol import PREFIX_SALT, WARM_STEPS, Command, lane_prompts, serve, tokens

from forkpoint.llm import Continuation, TransformersEngine

MODEL = "bundled:smollm2"


class Forkpoint:
    """An engine, and for each case the continuations with their prompts processed, kept from round to round."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        before = anonymous_and_file_bytes()
        self._engine = TransformersEngine.load(MODEL, threads=options["threads"], **options["load"])
        self._load_bytes = anonymous_and_file_bytes() - before
        self._runtime = self._engine._open()
        self._prepared: dict[tuple[int, int, bool], list[Continuation]] = {}

    def describe(self) -> dict[str, Any]:
        """What the benchmark needs to know of the model, and what loading it took."""
        loaded = self._engine._loaded
        assert loaded is not None
        weights = next(path for path in loaded.files if path.suffix == ".safetensors")
        return {
            "claim": self._engine.exactness.claim,
            "folder": str(weights.parent),
            "token_bytes": sum(group.token_bytes for group in self._engine.groups),
            "max_context": self._engine.max_context,
            "load_bytes": self._load_bytes,
            "own_bytes": _settled_bytes(),
            "stats": self._engine.stats(),
        }

    def stats(self) -> dict[str, Any]:
        """What the engine says is resident."""
        return dict(self._engine.stats())

    def prefill(self, context: int, salt: int) -> dict[str, float]:
        """A prompt to its first token."""
        prompt = tokens(context, salt)
        started = time.perf_counter()
        value = self._engine.start(prompt)
        value.logits().argmax()
        return {"seconds": time.perf_counter() - started}

    def decode(self, lanes: int, context: int, is_shared: bool, steps: int) -> dict[str, float]:
        """Steps of all lanes together, after their prompts."""
        current = self._lanes(lanes, context, is_shared)
        for _ in range(WARM_STEPS):
            current = self._step(current)
        started = time.perf_counter()
        for _ in range(steps):
            current = self._step(current)
        return {"seconds": time.perf_counter() - started, "tokens": lanes * steps}

    def fork(self, context: int, count: int) -> dict[str, Any]:
        """Seconds of one fork, and what ``count`` of them that nobody wrote to add to this process's memory."""
        base = self._base(context)
        base.fork()
        before, stats = _settled_bytes(), self.stats()
        forks, times = [], []
        for _ in range(count):
            started = time.perf_counter()
            forks.append(base.fork())
            times.append(time.perf_counter() - started)
        times.sort()
        added = _settled_bytes() - before
        return {"seconds": statistics.median(times), "bytes": added / count, "stats": [stats, self.stats()]}

    def growth(self, lanes: int, context: int, rounds: int, steps: int) -> dict[str, Any]:
        """Memory after each of some rounds; in each, forks are made, run for some steps and let go of."""
        sizes = []
        for _ in range(rounds):
            current = self._lanes(lanes, context, True)
            for _ in range(steps):
                current = self._step(current)
            del current
            sizes.append(_settled_bytes())
        return {"bytes": sizes, "stats": self.stats()}

    def _step(self, current: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
        stepped = self._runtime.step_many(current)
        return [(state, int(logits.argmax())) for state, logits in stepped]

    def _lanes(self, lanes: int, context: int, is_shared: bool) -> list[tuple[Any, int]]:
        """For each lane its state and the token to be processed next."""
        key = (lanes, context, is_shared)
        if key not in self._prepared:
            prompts = lane_prompts(lanes, context, is_shared)
            self._prepared[key] = (
                [self._base(context).extend(prompt[-1:]) for prompt in prompts]
                if is_shared
                else [self._engine.start(prompt) for prompt in prompts]
            )
        return [(value._cursor.state, value.pending) for value in self._prepared[key]]

    def _base(self, context: int) -> Continuation:
        """The shared prefix and one pending token, so that its last page is whole and nobody's own."""
        key = (0, context, True)
        if key not in self._prepared:
            self._prepared[key] = [self._engine.start([*tokens(context, PREFIX_SALT), 100])]
        return self._prepared[key][0]


def anonymous_and_file_bytes() -> int:
    """Memory of this process: its own and what it maps from files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return sum(_status_bytes(field) for field in ("RssAnon", "RssFile"))


def _settled_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("RssAnon")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel does not report {field}")


def load(options: Mapping[str, Any]) -> dict[str, Command]:
    """Load, and run each kind of request once."""
    engine = Forkpoint(options)
    engine.prefill(64, 0)
    names = ("describe", "prefill", "decode", "fork", "growth", "stats")
    return {name: getattr(engine, name) for name in names}


if __name__ == "__main__":
    serve(load)
