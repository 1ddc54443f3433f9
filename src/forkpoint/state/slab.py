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
from forkpoint.state.record import is_count

DTYPE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of an element of each dtype, under safetensors' names."""

MAX_AXES: Final = 8
MAX_ELEMENTS: Final = 2**48
NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")
"""What slabs and axes may be called: nothing that a separator, an escape or another alphabet could imitate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSpec:
    """What a slab is, without its bytes. ``axes`` names every dimension of ``shape``, outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            self._refuse("name", self.name, "use lower-case letters, digits, '_', '.' and '-'")
        if self.dtype not in DTYPE_BYTES:
            self._refuse("dtype", self.dtype, "use one of " + ", ".join(DTYPE_BYTES))
        self._check_axes()
        self._check_shape()

    def _check_axes(self) -> None:
        if len(self.shape) != len(self.axes) or len(self.shape) > MAX_AXES or len(set(self.axes)) != len(self.axes):
            self._refuse("axes", self.axes, f"name each of the {len(self.shape)} dimensions once, at most {MAX_AXES}")
        for axis in self.axes:
            if not isinstance(axis, str) or not NAME.fullmatch(axis):
                self._refuse("axes", self.axes, "use lower-case letters, digits, '_', '.' and '-'")

    def _check_shape(self) -> None:
        # Empty dimensions are left out of the product: other readers multiply from the left and refuse on the way.
        if not all(map(is_count, self.shape)) or math.prod(filter(None, self.shape)) > MAX_ELEMENTS:
            rule = f"sizes are integers from 0 and those above 0 multiply to at most {MAX_ELEMENTS}"
            self._refuse("shape", self.shape, rule)

    def _refuse(self, field: str, value: object, rule: str) -> None:
        raise InvalidInput(
            f"slab {self.name!r:.160}: {field} {value!r:.256} is not allowed; {rule}", code="slab", field=field
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
        have = 0
        for piece in self.pieces:
            view = memoryview(piece)
            have += view.nbytes
            if not view.c_contiguous:
                raise InvalidInput(
                    f"slab {self.spec.name} has a piece that is not contiguous; copy it first",
                    code="slab", slab=self.spec.name,
                )  # fmt: skip
        if have != self.spec.num_bytes:
            raise InvalidInput(
                f"slab {self.spec.name} holds {have} bytes; {self.spec.dtype} {self.spec.shape} needs {self.spec.num_bytes}",
                code="slab", slab=self.spec.name, have=have, want=self.spec.num_bytes,
            )  # fmt: skip
