"""Drawing a history as git does: a column for each line of descent, edges between them. Pure: ids in, text out.

Rows come children first. A parent that is not among the rows is not drawn. Where two columns wait for the same manifest, the
right one bends into the left one right below the child.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from forkpoint.ids import ManifestId


@final
class Graph:
    """Draws one manifest at a time.

    Args:
        shown: every manifest that will be drawn.
    """

    def __init__(self, shown: Collection[ManifestId]) -> None:
        self._shown = shown
        self._columns: list[ManifestId] = []

    def node(self, manifest_id: ManifestId) -> str:
        """The line of a manifest: a star in its column. A manifest that none waits for begins a column."""
        if manifest_id not in self._columns:
            self._columns.append(manifest_id)
        return "".join("* " if each == manifest_id else "| " for each in self._columns)

    def edges(self, manifest_id: ManifestId, parents: Sequence[ManifestId]) -> list[str]:
        """The lines below a manifest, where columns fork, join, end or move; mostly none."""
        column = self._columns.index(manifest_id)
        waiting = [parent for parent in parents if parent in self._shown]
        lines = [self._open(column, count) for count in range(1, len(waiting))]
        self._columns[column : column + 1] = waiting
        if not waiting and column < len(self._columns):
            lines.append("| " * column + " /" * (len(self._columns) - column))
        while (joined := self._join()) is not None:
            lines.append(joined)
        return [line.rstrip() for line in lines]

    def margin(self) -> str:
        """What stands left of further lines of text about the manifest drawn last, once its edges are drawn."""
        return "| " * len(self._columns)

    def _open(self, column: int, count: int) -> str:
        """One more column right of ``column``, which has ``count`` of its new ones already."""
        left, right = column + count, len(self._columns) - column - 1
        return "| " * (left - 1) + "|\\" + " \\" * right

    def _join(self) -> str | None:
        """Bend the first column that waits for what another one left of it waits for into that; None when there is none."""
        for source, each in enumerate(self._columns):
            target = self._columns.index(each)
            if target < source:
                del self._columns[source]
                bend = "| " * target + "|" + "_|" * (source - target - 1) + "/"
                return bend + " /" * (len(self._columns) - source)
        return None
