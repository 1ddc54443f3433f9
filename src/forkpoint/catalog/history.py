"""How every read asks "what was true then": the live rows of a fact table, now or as of an earlier transaction.

``as_of`` is a transaction number; None means now. A fact that was added and removed by one transaction was never true.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select
from sqlalchemy.sql.expression import FromClause

from forkpoint.catalog import schema
from forkpoint.catalog.records import TransactionRow

AnyRow: TypeAlias = "Row[*tuple[Any, ...]]"
"""A row inside this package; what leaves it is a record."""


def live(facts: FromClause, as_of: int | None) -> ColumnElement[bool]:
    """The condition that a row of ``facts`` (a fact table or an alias of one) was true at ``as_of``."""
    removed_tx = facts.c.removed_tx
    if as_of is None:
        return removed_tx.is_(None)
    return and_(facts.c.added_tx <= as_of, or_(removed_tx.is_(None), removed_tx > as_of))


class Reads(ABC):
    """What reads share: where they get a connection. A catalog opens one; a transaction lends its own."""

    __slots__ = ()

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction, for the length of one read."""


class HistoryReads(Reads):
    """Reads of the transactions themselves."""

    __slots__ = ()

    def current_tx(self) -> int:
        """Number of the last transaction; 0 before the first."""
        with self._reading() as connection:
            return int(connection.execute(select(schema.counter.c.tx)).scalar_one())

    def tx_at(self, at_us: int) -> int:
        """Number of the last transaction at or before a time; 0 if there was none."""
        query = select(func.max(schema.transaction.c.tx)).where(schema.transaction.c.at_us <= at_us)
        with self._reading() as connection:
            return int(connection.execute(query).scalar_one() or 0)

    def transactions(self, limit: int | None = None) -> list[TransactionRow]:
        """Transactions, newest first."""
        query = select(schema.transaction).order_by(schema.transaction.c.tx.desc()).limit(limit)
        with self._reading() as connection:
            return [TransactionRow(tx=row.tx, at_us=row.at_us, reason=row.reason) for row in connection.execute(query)]
