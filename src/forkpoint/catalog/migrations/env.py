"""Run by Alembic around the migrations: uses the connection, and so the transaction, that the catalog opened."""

from __future__ import annotations

from alembic import context

from forkpoint.catalog.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
