"""Bringing a database to the revision that this code reads. Alembic is imported only when there is something to do."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Inspector, inspect, text

from forkpoint.catalog.schema import HEAD_REVISION
from forkpoint.errors import Incompatible

_STAMP_TABLE = "alembic_version"
_SCRIPTS = Path(__file__).parent / "migrations"


def has_stamp_table(connection: Connection) -> bool:
    """Whether the database was ever migrated by this package."""
    inspector: Inspector = inspect(connection)
    return inspector.has_table(_STAMP_TABLE)


def find_stamp(connection: Connection) -> str | None:
    """The revision of the database; None when its stamp is empty."""
    return connection.execute(text(f"SELECT version_num FROM {_STAMP_TABLE}")).scalar_one_or_none()


def upgrade(connection: Connection) -> None:
    """Run the migrations that are missing, all in the caller's transaction.

    Raises:
        Incompatible: ``incompatible.catalog_version`` when the revision is none that this code knows.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    stamp = find_stamp(connection) if has_stamp_table(connection) else None
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if stamp is not None and stamp not in known:
        raise _too_new(stamp)
    command.upgrade(config, "head")


def _too_new(stamp: str) -> Incompatible:
    message = f"the catalog has version {stamp}, this Forkpoint reads up to {HEAD_REVISION}; upgrade Forkpoint"
    return Incompatible(message, code="catalog_version", field="catalog_version", found=stamp, supported=HEAD_REVISION)
