"""The first tables: facts with their life in transactions, edges, moves, collection, leases, ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

COUNT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DIGEST = sa.LargeBinary(32)
LIVE = sa.text("removed_tx IS NULL")


def upgrade() -> None:
    op.create_table(
        "chunk",
        sa.Column("fact", COUNT, nullable=False),
        sa.Column("chunk_id", DIGEST, nullable=False),
        sa.Column("num_bytes", COUNT, nullable=False),
        sa.Column("added_tx", COUNT, nullable=False),
        sa.Column("removed_tx", COUNT, nullable=True),
        sa.PrimaryKeyConstraint("fact"),
    )
    op.create_index("uq_chunk_live", "chunk", ["chunk_id"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE)
    op.create_table(
        "counter",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tx", COUNT, nullable=False),
        sa.Column("at_us", COUNT, nullable=False),
        sa.CheckConstraint("id = 1", name="ck_counter_one_row"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "decision",
        sa.Column("decision_id", COUNT, nullable=False),
        sa.Column("tx", COUNT, nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("chosen", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("decision_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_decision_subject", "decision", ["subject"], unique=False)
    op.create_table(
        "demand",
        sa.Column("demand_id", COUNT, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("subject", DIGEST, nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("wanted_since_us", COUNT, nullable=False),
        sa.Column("fulfilled_at_us", COUNT, nullable=True),
        sa.PrimaryKeyConstraint("demand_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_demand_subject", "demand", ["subject"], unique=False)
    op.create_table(
        "doomed",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("object_id", DIGEST, nullable=False),
        sa.Column("doomed_tx", COUNT, nullable=False),
        sa.Column("deleted_tx", COUNT, nullable=True),
        sa.PrimaryKeyConstraint("kind", "object_id"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_doomed_deleted", "doomed", ["deleted_tx"], unique=False)
    op.create_table(
        "lease",
        sa.Column("lease_id", sa.String(length=32), nullable=False),
        sa.Column("manifest_id", DIGEST, nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at_us", COUNT, nullable=False),
        sa.PrimaryKeyConstraint("lease_id"),
    )
    op.create_index("ix_lease_manifest_id", "lease", ["manifest_id"], unique=False)
    op.create_table(
        "manifest",
        sa.Column("fact", COUNT, nullable=False),
        sa.Column("manifest_id", DIGEST, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("state_id", DIGEST, nullable=False),
        sa.Column("execution_id", DIGEST, nullable=False),
        sa.Column("position", COUNT, nullable=True),
        sa.Column("pending", COUNT, nullable=True),
        sa.Column("num_bytes", COUNT, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("tokenizer_id", DIGEST, nullable=True),
        sa.Column("trusted_tx", COUNT, nullable=True),
        sa.Column("added_tx", COUNT, nullable=False),
        sa.Column("removed_tx", COUNT, nullable=True),
        sa.PrimaryKeyConstraint("fact"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_manifest_manifest_id", "manifest", ["manifest_id"], unique=False)
    op.create_index(
        "uq_manifest_live", "manifest", ["manifest_id"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE
    )
    op.create_table(
        "move",
        sa.Column("ordinal", COUNT, nullable=False),
        sa.Column("move_id", DIGEST, nullable=False),
        sa.Column("previous", DIGEST, nullable=True),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("old", sa.Text(), nullable=True),
        sa.Column("new", sa.Text(), nullable=True),
        sa.Column("tx", COUNT, nullable=False),
        sa.Column("at_us", COUNT, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("is_trusted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("ordinal"),
        sa.UniqueConstraint("move_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_move_at_us", "move", ["at_us"], unique=False)
    op.create_index("ix_move_ref", "move", ["ref", "ordinal"], unique=False)
    op.create_table(
        "prefix",
        sa.Column("fact", COUNT, nullable=False),
        sa.Column("key", DIGEST, nullable=False),
        sa.Column("execution_id", DIGEST, nullable=False),
        sa.Column("group_name", sa.String(length=64), nullable=False),
        sa.Column("chunk_index", COUNT, nullable=False),
        sa.Column("chunk_id", DIGEST, nullable=False),
        sa.Column("added_tx", COUNT, nullable=False),
        sa.Column("removed_tx", COUNT, nullable=True),
        sa.PrimaryKeyConstraint("fact"),
    )
    op.create_index(
        "ix_prefix_live_chunk", "prefix", ["chunk_id"], unique=False, sqlite_where=LIVE, postgresql_where=LIVE
    )
    op.create_index(
        "uq_prefix_live",
        "prefix",
        ["key", "execution_id", "group_name"],
        unique=True,
        sqlite_where=LIVE,
        postgresql_where=LIVE,
    )
    op.create_table(
        "purge",
        sa.Column("purge_id", COUNT, nullable=False),
        sa.Column("manifest_id", DIGEST, nullable=False),
        sa.Column("tx", COUNT, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("purge_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "ref",
        sa.Column("fact", COUNT, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("target", DIGEST, nullable=True),
        sa.Column("symbolic", sa.Text(), nullable=True),
        sa.Column("move_id", DIGEST, nullable=False),
        sa.Column("added_tx", COUNT, nullable=False),
        sa.Column("removed_tx", COUNT, nullable=True),
        sa.CheckConstraint("(target IS NULL) <> (symbolic IS NULL)", name="ck_ref_one_value"),
        sa.PrimaryKeyConstraint("fact"),
    )
    op.create_index("ix_ref_name", "ref", ["name"], unique=False)
    op.create_index("uq_ref_live", "ref", ["name"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE)
    op.create_table(
        "transaction",
        sa.Column("tx", COUNT, autoincrement=False, nullable=False),
        sa.Column("at_us", COUNT, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tx"),
    )
    op.create_index("ix_transaction_at_us", "transaction", ["at_us"], unique=False)
    op.create_table(
        "manifest_chunk",
        sa.Column("fact", COUNT, nullable=False),
        sa.Column("chunk_id", DIGEST, nullable=False),
        sa.Column("num_bytes", COUNT, nullable=False),
        sa.ForeignKeyConstraint(
            ["fact"],
            ["manifest.fact"],
        ),
        sa.PrimaryKeyConstraint("fact", "chunk_id"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_manifest_chunk_chunk_id", "manifest_chunk", ["chunk_id"], unique=False)
    op.create_table(
        "manifest_parent",
        sa.Column("fact", COUNT, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("parent_id", DIGEST, nullable=False),
        sa.ForeignKeyConstraint(
            ["fact"],
            ["manifest.fact"],
        ),
        sa.PrimaryKeyConstraint("fact", "ordinal"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_manifest_parent_parent_id", "manifest_parent", ["parent_id"], unique=False)
    op.execute("INSERT INTO counter (id, tx, at_us) VALUES (1, 0, 0)")
