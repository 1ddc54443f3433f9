"""All that differs between databases: opening, locking, clock, upsert, integrity. No other module names one.

SQLite: WAL, ``synchronous=FULL``, foreign keys on, and ``BEGIN IMMEDIATE`` for the writing engine, so that a writer waits
for the lock before it reads. PostgreSQL: readers see one snapshot (REPEATABLE READ); writers wait for the counter row, for
which READ COMMITTED is right: after the wait they must see what the other wrote.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Integer,
    Table,
    cast,
    create_engine,
    event,
    func,
    literal_column,
    make_url,
    text,
)
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from forkpoint.catalog.translation import translate_on
from forkpoint.errors import InvalidInput

T = TypeVar("T")

MAX_VARIABLES: Final = 8_192
"""Ids bound in one statement; SQLite allows 32,766 variables, PostgreSQL 65,535."""

_WRITES: Final = "forkpoint_writes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Two faces of one connection pool: one whose transactions only read, one whose transactions write."""

    read: Engine
    write: Engine

    def dispose(self) -> None:
        self.read.dispose()


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite catalog at ``path``, whatever characters the path holds."""
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite catalog; None for other databases.

    Raises:
        InvalidInput: ``invalid_input.catalog_url`` for an in-memory SQLite database, which could not be shared or kept.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidInput(f"{url!r} names no file; write sqlite:///path", code="catalog_url", url=url)
    return Path(parsed.database)


def open_engines(url: str, *, busy_timeout_s: float) -> Engines:
    """Engines for ``url``; connects to nothing yet. SQLAlchemy's errors leave them as Forkpoint's."""
    parsed = make_url(url)
    match parsed.get_backend_name():
        case "sqlite":
            engines = _open_sqlite(parsed, busy_timeout_s)
        case "postgresql":
            engines = _open_postgresql(parsed, busy_timeout_s)
        case other:
            raise InvalidInput(f"a catalog cannot be kept in {other}; use sqlite or postgresql", code="catalog_url")
    translate_on(engines.read)
    return engines


def _open_sqlite(url: URL, busy_timeout_s: float) -> Engines:
    # Connections cost little here, and refusing a thread one would be an error that SQLite itself does not have.
    engine = create_engine(url, max_overflow=-1, connect_args={"timeout": busy_timeout_s, "isolation_level": None})

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA secure_delete=ON")  # what a purge removes is overwritten
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return Engines(read=engine, write=engine.execution_options(**{_WRITES: True}))


def _open_postgresql(url: URL, busy_timeout_s: float) -> Engines:
    timeout_ms = int(busy_timeout_s * 1000)
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        isolation_level="REPEATABLE READ",
        pool_pre_ping=True,
        pool_timeout=busy_timeout_s,
        connect_args={"options": f"-c lock_timeout={timeout_ms}"},
    )
    return Engines(read=engine, write=engine.execution_options(isolation_level="READ COMMITTED"))


def reserve_file(path: Path) -> None:
    """Create an empty database file that only its owner can read; SQLite gives its -wal and -shm the same mode.

    An existing file stays as it is.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return


def now_us(connection: Connection) -> ColumnElement[int]:
    """The database's clock as an SQL expression: microseconds since 1970."""
    if connection.dialect.name == "sqlite":
        seconds = cast(func.strftime("%s", "now"), Integer)
        millis = cast(func.substr(func.strftime("%f", "now"), 4), Integer)
        return seconds * 1_000_000 + millis * 1_000
    return literal_column("CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)", Integer)


def insert_missing(connection: Connection, table: Table, rows: Sequence[dict[str, object]]) -> None:
    """Insert rows; those that a unique index (also one over live rows only) has already are passed over."""
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite

        connection.execute(sqlite.insert(table).on_conflict_do_nothing(), rows)
    else:
        from sqlalchemy.dialects import postgresql

        connection.execute(postgresql.insert(table).on_conflict_do_nothing(), rows)


def check_pages(connection: Connection) -> list[str]:
    """What the database itself finds wrong with its file; empty when it finds nothing or cannot tell."""
    if connection.dialect.name != "sqlite":
        return []
    damage = [row[0] for row in connection.execute(text("PRAGMA integrity_check")) if row[0] != "ok"]
    orphans = [f"{row[0]} row {row[1]} refers to a missing {row[2]}" for row in _foreign_key_check(connection)]
    return damage + orphans


def _foreign_key_check(connection: Connection) -> Iterable[Sequence[object]]:
    return connection.execute(text("PRAGMA foreign_key_check")).all()


def forget_deleted(engines: Engines) -> None:
    """Leave no deleted row in the write-ahead log, as far as other readers permit."""
    if engines.read.dialect.name == "sqlite":
        with engines.read.connect() as connection:
            autocommit = connection.execution_options(isolation_level="AUTOCOMMIT")
            autocommit.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")


def in_batches(items: Iterable[T], size: int = MAX_VARIABLES) -> Iterator[list[T]]:
    """Lists of at most ``size`` items, so that no statement has more variables than a database takes."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
