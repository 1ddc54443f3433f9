"""What this machine can do at most: bytes read from memory, and bfloat16 multiplications, in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from protocol import Command, serve

READ_BYTES = 1 << 29
"""Far above any cache."""

SIZE = 2048
"""Rows, inputs and outputs of the matrix product."""


class Limits:
    """The data that is read and multiplied; each figure is the best of several ways, each the best of several times."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._numbers = torch.ones(READ_BYTES // 4)
        generator = torch.Generator().manual_seed(0)
        self._left = torch.randn(SIZE, SIZE, generator=generator).bfloat16()
        self._right = torch.randn(SIZE, SIZE, generator=generator).bfloat16()

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {"torch": torch.__version__, "threads": torch.get_num_threads()}

    def read(self) -> dict[str, float]:
        """Bytes in a second."""
        data = self._numbers
        ways: list[Callable[[], object]] = [data.sum, data.max, lambda: torch.dot(data, data)]
        return {"rate": READ_BYTES / min(_best(way) for way in ways)}

    def multiply(self) -> dict[str, float]:
        """Floating point operations in a second, two for each product and sum."""
        ways: list[Callable[[], object]] = [lambda: torch.nn.functional.linear(self._left, self._right)]
        packed = self._packed()
        if packed is not None:
            ways.append(packed)
        return {"rate": 2 * SIZE**3 / min(_best(way) for way in ways)}

    def _packed(self) -> Callable[[], object] | None:
        """Forkpoint's own product, where it was built."""
        return None


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def load(options: Mapping[str, Any]) -> dict[str, Command]:
    """Make the data and go through it once."""
    limits = Limits(options)
    limits.read()
    return {"describe": limits.describe, "read": limits.read, "multiply": limits.multiply}


if __name__ == "__main__":
    with torch.inference_mode():
        serve(load)
