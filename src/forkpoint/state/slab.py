"""A slab: one named array as bytes, with dtype, shape and named axes. Row-major, little-endian, contiguous.

Knows nothing of torch or of files. A slab's bytes may lie in several pieces (one a layer, say), so that state can be
captured from where it lives without a copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import InvalidInput
from forkpoint.ids import Bytes

DTYPE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of an element of each dtype, under safetensors' names."""

MAX_AXES: Final = 8
MAX_ELEMENTS: Final = 2**48
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSpec:
    """What a slab is, without its bytes. ``axes`` names every dimension of ``shape``, outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            _refuse(self.name, "name", self.name, "use lower-case letters, digits, '_', '.' and '-'")
        if self.dtype not in DTYPE_BYTES:
            _refuse(self.name, "dtype", self.dtype, "use one of " + ", ".join(DTYPE_BYTES))
        if len(self.shape) != len(self.axes) or len(self.shape) > MAX_AXES or len(set(self.axes)) != len(self.axes):
            _refuse(
                self.name,
                "axes",
                str(self.axes),
                f"name each of the {len(self.shape)} dimensions once, at most {MAX_AXES}",
            )
        if any(not _NAME.fullmatch(axis) for axis in self.axes):
            _refuse(self.name, "axes", str(self.axes), "use lower-case letters, digits, '_', '.' and '-'")
        if any(size < 0 for size in self.shape) or math.prod(self.shape) > MAX_ELEMENTS:
            _refuse(
                self.name, "shape", str(self.shape), f"sizes are at least 0 and at most {MAX_ELEMENTS} elements in all"
            )

    @property
    def num_bytes(self) -> int:
        """Size of the slab's data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A slab with its bytes, in row-major order, as one or more pieces laid end to end."""

    spec: SlabSpec
    pieces: Sequence[Bytes]

    def __post_init__(self) -> None:
        have = sum(memoryview(piece).nbytes for piece in self.pieces)
        if have != self.spec.num_bytes:
            raise InvalidInput(
                f"slab {self.spec.name} holds {have} bytes; {self.spec.dtype} {self.spec.shape} needs {self.spec.num_bytes}",
                code="slab", slab=self.spec.name, have=have, want=self.spec.num_bytes,
            )  # fmt: skip


def _refuse(slab: str, field: str, value: str, rule: str) -> None:
    raise InvalidInput(f"slab {slab!r}: {field} {value!r} is not allowed; {rule}", code="slab", slab=slab, field=field)
