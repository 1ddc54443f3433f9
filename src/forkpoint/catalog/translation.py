"""Where the database driver's errors end: each becomes one of Forkpoint's, by its code and never by its text."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from forkpoint.errors import CapacityExceeded, Corrupt, Error, InvalidInput, Unavailable

_BUSY: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CORRUPT: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA}
_REFUSED: Final = {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_RANGE}

_SQLSTATES: Final[dict[str, int]] = {
    "55P03": sqlite3.SQLITE_BUSY,  # lock_not_available
    "40001": sqlite3.SQLITE_BUSY,  # serialization_failure
    "40P01": sqlite3.SQLITE_BUSY,  # deadlock_detected
    "53100": sqlite3.SQLITE_FULL,  # disk_full
    "25006": sqlite3.SQLITE_READONLY,  # read_only_sql_transaction
    "XX001": sqlite3.SQLITE_CORRUPT,  # data_corrupted
    "XX002": sqlite3.SQLITE_CORRUPT,  # index_corrupted
    "42P01": sqlite3.SQLITE_CORRUPT,  # undefined_table
    "42703": sqlite3.SQLITE_CORRUPT,  # undefined_column
}
"""PostgreSQL's conditions, as the SQLite condition that is handled alike. Classes 22 and 23 are refused values."""


def corrupt_catalog(detail: str) -> Corrupt:
    return Corrupt(f"the catalog is damaged ({detail}); run forkpoint fsck --rebuild-catalog", code="catalog")


def translate_on(engine: Engine) -> None:
    """Make every driver error that passes through ``engine`` leave it as one of Forkpoint's."""

    @event.listens_for(engine, "handle_error")
    def translate(context: ExceptionContext) -> None:
        error = context.original_exception
        driver = context.dialect.loaded_dbapi
        if isinstance(error, ValueError | OverflowError | driver.DataError):
            raise _refused(str(error)) from error
        if isinstance(error, driver.Error):
            raise _translated(error) from error


@contextmanager
def connected(engine: Engine) -> Iterator[Connection]:
    """A connection in a transaction of its own: committed on exit, rolled back on an exception.

    Raises:
        Unavailable: ``unavailable.catalog_busy`` when the lock, or a free connection, did not come in time.
    """
    try:
        connection = engine.connect()
    except PoolTimeoutError as error:
        raise _busy("every connection is in use") from error
    with connection, connection.begin():
        yield connection


def _translated(error: BaseException) -> Error:
    code, detail = _condition(error), str(error)
    if code in _BUSY:
        return _busy(detail)
    if code in _CORRUPT:
        return corrupt_catalog(detail)
    if code in _REFUSED:
        return _refused(detail)
    if code == sqlite3.SQLITE_FULL:
        return CapacityExceeded("no space is left for the catalog; free some and try again", code="disk")
    if code == sqlite3.SQLITE_READONLY:
        return Unavailable(f"the catalog cannot be written ({detail}); check its permissions", code="catalog_readonly")
    return Unavailable(f"the catalog did not serve ({detail}); check its path, permissions and server", code="catalog")


def _condition(error: BaseException) -> int | None:
    """The primary SQLite result code that ``error`` stands for."""
    extended = getattr(error, "sqlite_errorcode", None)
    if isinstance(extended, int):
        return extended & 0xFF
    state = getattr(error, "sqlstate", None)
    if not isinstance(state, str):
        return None
    return sqlite3.SQLITE_CONSTRAINT if state[:2] in {"22", "23"} else _SQLSTATES.get(state)


def _busy(detail: str) -> Unavailable:
    return Unavailable(f"the catalog is in use by another writer ({detail}); try again", code="catalog_busy")


def _refused(detail: str) -> InvalidInput:
    return InvalidInput(f"the catalog cannot hold a value it was given ({detail})", code="catalog_value")
