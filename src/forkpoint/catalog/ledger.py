"""Reads of demand, decisions and purges."""

from __future__ import annotations

from sqlalchemy import select

from forkpoint.catalog.history import Reads
from forkpoint.catalog.records import DecisionRow, DemandKind, DemandRow, PurgeRow
from forkpoint.catalog.schema import decision, demand, purge


class LedgerReads(Reads):
    """Who wants what, what was decided and why, and what was purged."""

    __slots__ = ()

    def demands(self, limit: int | None = None) -> list[DemandRow]:
        """Demand that is not fulfilled, oldest first."""
        query = select(demand).where(demand.c.fulfilled_at_us.is_(None)).order_by(demand.c.demand_id).limit(limit)
        with self._reading() as connection:
            return [
                DemandRow(
                    demand_id=row.demand_id,
                    kind=DemandKind(row.kind),
                    subject=row.subject,
                    worker=row.worker,
                    wanted_since_us=row.wanted_since_us,
                    fulfilled_at_us=row.fulfilled_at_us,
                )
                for row in connection.execute(query)
            ]

    def decisions(
        self, subject: str | None = None, limit: int | None = None, as_of: int | None = None
    ) -> list[DecisionRow]:
        """Decisions about one subject, or all, newest first."""
        query = select(decision).order_by(decision.c.decision_id.desc()).limit(limit)
        if subject is not None:
            query = query.where(decision.c.subject == subject)
        if as_of is not None:
            query = query.where(decision.c.tx <= as_of)
        with self._reading() as connection:
            return [
                DecisionRow(
                    decision_id=row.decision_id,
                    tx=row.tx,
                    subject=row.subject,
                    kind=row.kind,
                    chosen=row.chosen,
                    reason=row.reason,
                    detail=row.detail,
                )
                for row in connection.execute(query)
            ]

    def purges(self) -> list[PurgeRow]:
        """What was purged, oldest first."""
        with self._reading() as connection:
            return [
                PurgeRow(manifest_id=row.manifest_id, tx=row.tx, reason=row.reason)
                for row in connection.execute(select(purge).order_by(purge.c.purge_id))
            ]
