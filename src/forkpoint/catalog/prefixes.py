"""Prefix lookup: how much of a token sequence is stored already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select

from forkpoint.catalog.dialect import in_batches
from forkpoint.catalog.history import Reads, live
from forkpoint.catalog.records import PrefixMatch, PrefixRow
from forkpoint.catalog.schema import prefix
from forkpoint.ids import ObjectId


class PrefixReads(Reads):
    """The prefix index."""

    __slots__ = ()

    def longest_prefix(
        self, keys: Sequence[ObjectId], execution_id: ObjectId, groups: Sequence[str], as_of: int | None = None
    ) -> PrefixMatch:
        """The largest ``i`` such that every group has a row for ``keys[i - 1]``, with the rows up to there.

        Args:
            keys: the prefix key chain, shortest prefix first.
            execution_id: rows of other executions do not count.
            groups: the state groups that are all needed; at least one.
            as_of: costs a scan of the index when it is not None.
        """
        assert groups, "a prefix without state groups says nothing"
        found = self._rows_by_key(keys, execution_id, groups, as_of)
        num_chunks = len(keys)
        while num_chunks and len(found[keys[num_chunks - 1]]) < len(set(groups)):
            num_chunks -= 1
        rows = [row for key in keys[:num_chunks] for row in sorted(found[key], key=lambda row: row.group)]
        return PrefixMatch(num_chunks=num_chunks, rows=tuple(rows))

    def _rows_by_key(
        self, keys: Sequence[ObjectId], execution_id: ObjectId, groups: Sequence[str], as_of: int | None
    ) -> defaultdict[ObjectId, list[PrefixRow]]:
        found: defaultdict[ObjectId, list[PrefixRow]] = defaultdict(list)
        columns = (prefix.c.key, prefix.c.group_name, prefix.c.chunk_index, prefix.c.chunk_id)
        with self._reading() as connection:
            for batch in in_batches(keys):
                query = select(*columns).where(
                    prefix.c.key.in_(batch),
                    prefix.c.execution_id == execution_id,
                    prefix.c.group_name.in_(groups),
                    live(prefix, as_of),
                )
                for key, group, index, chunk_id in connection.execute(query).all():
                    row = PrefixRow(key=key, execution_id=execution_id, group=group, index=index, chunk_id=chunk_id)
                    found[key].append(row)
        return found
