"""Reads of refs and of their moves (the reflog)."""

from __future__ import annotations

from sqlalchemy import func, select

from forkpoint.catalog.history import AnyRow, Reads, live
from forkpoint.catalog.records import MoveRow, RefRow
from forkpoint.catalog.schema import move, ref
from forkpoint.ids import ManifestId, MoveId


class RefReads(Reads):
    """Refs and moves."""

    __slots__ = ()

    def find_ref(self, name: str, as_of: int | None = None) -> RefRow | None:
        with self._reading() as connection:
            row = connection.execute(select(ref).where(ref.c.name == name, live(ref, as_of))).one_or_none()
        return None if row is None else _ref_row(row)

    def refs(self, prefix: str = "", as_of: int | None = None) -> list[RefRow]:
        """Refs whose name starts with ``prefix``, by name."""
        query = select(ref).where(func.substr(ref.c.name, 1, len(prefix)) == prefix, live(ref, as_of))
        with self._reading() as connection:
            found = [_ref_row(row) for row in connection.execute(query)]
        return sorted(found, key=lambda row: row.name)

    def moves(self, ref: str | None = None, limit: int | None = None, as_of: int | None = None) -> list[MoveRow]:
        """Moves of one ref, or of all, newest first; also those of refs that were deleted since."""
        query = select(move).order_by(move.c.ordinal.desc()).limit(limit)
        if ref is not None:
            query = query.where(move.c.ref == ref)
        if as_of is not None:
            query = query.where(move.c.tx <= as_of)
        with self._reading() as connection:
            return [_move_row(row) for row in connection.execute(query)]

    def first_movers(self, as_of: int | None = None) -> dict[ManifestId, str]:
        """Who was the first to move a ref to each manifest that a ref was ever moved to: mostly, who published it."""
        query = select(move.c.new, move.c.who).where(move.c.new.like("b3:%")).order_by(move.c.ordinal.desc())
        if as_of is not None:
            query = query.where(move.c.tx <= as_of)
        with self._reading() as connection:
            return {ManifestId(new): who for new, who in connection.execute(query)}

    def ref_at(self, name: str, n: int, as_of: int | None = None) -> str | None:
        """``name@{n}``: what the ref was ``n`` moves ago, written like ``MoveRow.new``; 0 is its value now.

        None when it did not exist then, or has not been moved so often.
        """
        moves = self.moves(name, limit=n + 1, as_of=as_of)
        return moves[n].new if len(moves) > n else None

    def last_move_id(self, ref: str) -> MoveId | None:
        """The last move of a ref, also when that move deleted it: what the next one chains to."""
        query = select(move.c.move_id).where(move.c.ref == ref).order_by(move.c.ordinal.desc()).limit(1)
        with self._reading() as connection:
            return connection.execute(query).scalar_one_or_none()


def _ref_row(row: AnyRow) -> RefRow:
    return RefRow(name=row.name, target=row.target, symbolic=row.symbolic, move_id=row.move_id, added_tx=row.added_tx)


def _move_row(row: AnyRow) -> MoveRow:
    return MoveRow(
        move_id=row.move_id,
        previous=row.previous,
        ref=row.ref,
        old=row.old,
        new=row.new,
        tx=row.tx,
        at_us=row.at_us,
        who=row.who,
        message=row.message,
        is_trusted=row.is_trusted,
    )
