"""What this machine can do at most: bytes read from memory, and bfloat16 multiplications, in a second; and dense layers both ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from protocol import Command, serve
from torch import Tensor

from forkpoint.llm.kernels.dense import pack, packed_linear

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
        self._layers: DenseLayers | None = None

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
        packed = pack(self._right)
        ways: list[Callable[[], object]] = [
            lambda: F.linear(self._left, self._right),
            lambda: packed_linear(self._left, packed, None, SIZE),
        ]
        return {"rate": 2 * SIZE**3 / min(_best(way) for way in ways)}

    def dense(self, shapes: Sequence[tuple[int, int]], rows: int) -> dict[str, float]:
        """Seconds of ``rows`` rows through dense layers of these shapes ``(outputs, inputs)``, all of them one after another.

        ``invariant`` by Forkpoint's product, ``library`` by the faster of torch's plain one and oneDNN's on weights laid out for it.
        """
        if self._layers is None:
            self._layers = DenseLayers(shapes)
        layers = self._layers
        inputs = {size: torch.randn(rows, size).bfloat16() for size in {size for _, size in shapes}}
        ways = {"invariant": layers.invariant, "plain": layers.plain, "prepacked": layers.prepacked}
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(5):
            for name, way in ways.items():
                started = time.perf_counter()
                way(inputs)
                samples[name].append(time.perf_counter() - started)
        found = {name: statistics.median(values) for name, values in samples.items()}
        return {"invariant": found["invariant"], "library": min(found["plain"], found["prepacked"])}


class DenseLayers:
    """Random weights of some shapes, each in three layouts, so that none is in a cache when it is used again."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        plain = [torch.randn(outputs, inputs).bfloat16() for outputs, inputs in shapes]
        self._plain = plain
        self._packed = [pack(weight) for weight in plain]
        self._prepacked = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain]

    def invariant(self, inputs: Mapping[int, Tensor]) -> None:
        """By one accumulator a row and output, in one order."""
        for weight, packed in zip(self._plain, self._packed, strict=True):
            packed_linear(inputs[weight.shape[1]], packed, None, weight.shape[0])

    def plain(self, inputs: Mapping[int, Tensor]) -> None:
        """As torch does it."""
        for weight in self._plain:
            F.linear(inputs[weight.shape[1]], weight)

    def prepacked(self, inputs: Mapping[int, Tensor]) -> None:
        """As oneDNN does it on weights in its own layout."""
        for weight, packed in zip(self._plain, self._prepacked, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[weight.shape[1]], packed, None, "none", [], "")


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
    return {"describe": limits.describe, "read": limits.read, "multiply": limits.multiply, "dense": limits.dense}


if __name__ == "__main__":
    with torch.inference_mode():
        serve(load)
