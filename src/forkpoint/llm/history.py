"""An immutable token history that grows without copying: a view of the first ``length`` items of a shared, append-only list.

The same shape as the state it belongs to: the longest view appends in place, a shorter one copies once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, final, overload

import numpy as np
from numpy.typing import NDArray


@final
class History(Sequence[int]):
    """Token ids. Equal to itself alone; compare ``tuple(history)`` for the ids."""

    __slots__ = ("_items", "_length", "_lock")

    def __init__(self, tokens: Iterable[int]) -> None:
        self._items = list(tokens)
        self._length = len(self._items)
        self._lock = threading.Lock()

    def append(self, token: int) -> History:
        """A history with one more token; this one is unchanged."""
        with self._lock:
            if len(self._items) == self._length:
                self._items.append(token)
                return self._view(self._items, self._length + 1, self._lock)
        return History([*self._items[: self._length], token])

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self._items[place] for place in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._items[index if index >= 0 else index + self._length]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.int64]:
        return np.array(self._items[: self._length], dtype=dtype or np.int64)

    @classmethod
    def _view(cls, items: list[int], length: int, lock: threading.Lock) -> History:
        view = cls.__new__(cls)
        view._items, view._length, view._lock = items, length, lock
        return view
