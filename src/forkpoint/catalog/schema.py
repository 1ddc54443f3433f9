"""The tables of the catalog, as SQLAlchemy Core values. No queries here.

Three sorts of table:

* **Facts** (`manifest`, `chunk`, `prefix`, `ref`): rows are appended; a row lives from ``added_tx`` until ``removed_tx``
  (NULL while live) and nothing else of it changes, but for ``manifest.trusted_tx``, which is set once.
* **Edges** (`manifest_parent`, `manifest_chunk`): belong to one manifest fact, so they share its life.
* **Records** (`transaction`, `move`, `doomed`, `decision`, `purge`) carry the number of the transaction that wrote them;
  `lease` and `demand` are noise outside the history.

A change here needs a migration in ``migrations/versions`` and a new ``HEAD_REVISION``; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)

from forkpoint.ids import ObjectId, digest_bytes

HEAD_REVISION: Final = "0001"
"""The revision that this code reads and writes; the last one in ``migrations/versions``."""

Count: Final = BigInteger().with_variant(Integer, "sqlite")
"""64-bit integer. SQLite numbers rows by itself only in a column declared INTEGER."""


class Digest(TypeDecorator[ObjectId]):
    """An object id, stored as its 32 raw bytes."""

    impl = LargeBinary(32)
    cache_ok = True

    def process_bind_param(self, value: ObjectId | None, dialect: Dialect) -> bytes | None:
        return None if value is None else digest_bytes(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[bytes | None], ObjectId | None]:
        """One call a value, not the three that a ``process_result_value`` costs: a log reads tens of thousands."""
        return _read_digest


def _read_digest(value: bytes | None) -> ObjectId | None:
    return None if value is None else ObjectId("b3:" + value.hex())


metadata: Final = MetaData()

counter = Table(
    "counter",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("tx", Count, nullable=False),
    Column("at_us", Count, nullable=False),
    CheckConstraint("id = 1", name="ck_counter_one_row"),
)
"""One row: number and time of the last transaction. Updating it is what makes writers take turns."""

transaction = Table(
    "transaction",
    metadata,
    Column("tx", Count, primary_key=True, autoincrement=False),
    Column("at_us", Count, nullable=False, index=True),
    Column("reason", Text, nullable=False),
)

manifest = Table(
    "manifest",
    metadata,
    Column("fact", Count, primary_key=True),
    Column("manifest_id", Digest, nullable=False, index=True),
    Column("kind", String(32), nullable=False),
    Column("state_id", Digest, nullable=False),
    Column("execution_id", Digest, nullable=False),
    Column("position", Count),
    Column("pending", Count),
    Column("num_bytes", Count, nullable=False),
    Column("message", Text, nullable=False),
    Column("tokenizer_id", Digest),
    Column("trusted_tx", Count),
    Column("added_tx", Count, nullable=False),
    Column("removed_tx", Count),
    sqlite_autoincrement=True,
)

manifest_parent = Table(
    "manifest_parent",
    metadata,
    Column("fact", ForeignKey("manifest.fact"), primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("role", String(32), nullable=False),
    Column("parent_id", Digest, nullable=False, index=True),
    sqlite_with_rowid=False,
)
"""``parent_id`` names a manifest that may be absent: then the history is shallow there."""

manifest_chunk = Table(
    "manifest_chunk",
    metadata,
    Column("fact", ForeignKey("manifest.fact"), primary_key=True),
    Column("chunk_id", Digest, primary_key=True, index=True),
    Column("num_bytes", Count, nullable=False),
    sqlite_with_rowid=False,
)
"""The chunks that a manifest introduces."""

chunk = Table(
    "chunk",
    metadata,
    Column("fact", Count, primary_key=True),
    Column("chunk_id", Digest, nullable=False),
    Column("num_bytes", Count, nullable=False),
    Column("added_tx", Count, nullable=False),
    Column("removed_tx", Count),
)

prefix = Table(
    "prefix",
    metadata,
    Column("fact", Count, primary_key=True),
    Column("key", Digest, nullable=False),
    Column("execution_id", Digest, nullable=False),
    Column("group_name", String(64), nullable=False),
    Column("chunk_index", Count, nullable=False),
    Column("chunk_id", Digest, nullable=False),
    Column("added_tx", Count, nullable=False),
    Column("removed_tx", Count),
)

ref = Table(
    "ref",
    metadata,
    Column("fact", Count, primary_key=True),
    Column("name", Text, nullable=False, index=True),
    Column("target", Digest),
    Column("symbolic", Text),
    Column("move_id", Digest, nullable=False),
    Column("added_tx", Count, nullable=False),
    Column("removed_tx", Count),
    CheckConstraint("(target IS NULL) <> (symbolic IS NULL)", name="ck_ref_one_value"),
)

move = Table(
    "move",
    metadata,
    Column("ordinal", Count, primary_key=True),
    Column("move_id", Digest, nullable=False, unique=True),
    Column("previous", Digest),
    Column("ref", Text, nullable=False),
    Column("old", Text),
    Column("new", Text),
    Column("tx", Count, nullable=False),
    Column("at_us", Count, nullable=False, index=True),
    Column("who", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("is_trusted", Boolean, nullable=False),
    sqlite_autoincrement=True,
)

doomed = Table(
    "doomed",
    metadata,
    Column("kind", String(16), primary_key=True),
    Column("object_id", Digest, primary_key=True),
    Column("doomed_tx", Count, nullable=False),
    Column("deleted_tx", Count),
    sqlite_with_rowid=False,
)

lease = Table(
    "lease",
    metadata,
    Column("lease_id", String(32), primary_key=True),
    Column("manifest_id", Digest, nullable=False, index=True),
    Column("holder", Text, nullable=False),
    Column("expires_at_us", Count, nullable=False),
)

demand = Table(
    "demand",
    metadata,
    Column("demand_id", Count, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("subject", Digest, nullable=False, index=True),
    Column("worker", Text, nullable=False),
    Column("wanted_since_us", Count, nullable=False),
    Column("fulfilled_at_us", Count),
    sqlite_autoincrement=True,
)

decision = Table(
    "decision",
    metadata,
    Column("decision_id", Count, primary_key=True),
    Column("tx", Count, nullable=False),
    Column("subject", Text, nullable=False, index=True),
    Column("kind", String(32), nullable=False),
    Column("chosen", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    sqlite_autoincrement=True,
)

purge = Table(
    "purge",
    metadata,
    Column("purge_id", Count, primary_key=True),
    Column("manifest_id", Digest, nullable=False),
    Column("tx", Count, nullable=False),
    Column("reason", Text, nullable=False),
    sqlite_autoincrement=True,
)


def _index_live(name: str, table: Table, *columns: str, unique: bool) -> None:
    """An index over the live rows of a fact table only.

    The migration says the same to PostgreSQL. Saying it here too would load that dialect, and asyncio, wherever SQLite is used.
    """
    Index(name, *(table.c[c] for c in columns), unique=unique, sqlite_where=table.c.removed_tx.is_(None))


_index_live("uq_manifest_live", manifest, "manifest_id", unique=True)
_index_live("uq_chunk_live", chunk, "chunk_id", unique=True)
_index_live("uq_prefix_live", prefix, "key", "execution_id", "group_name", unique=True)
_index_live("ix_prefix_live_chunk", prefix, "chunk_id", unique=False)
_index_live("uq_ref_live", ref, "name", unique=True)
Index("ix_move_ref", move.c.ref, move.c.ordinal)
Index("ix_doomed_deleted", doomed.c.deleted_tx)
