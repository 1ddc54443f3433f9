"""What only a SQLite file can get right or wrong: durability settings, modes, damage, versions, locks."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import event

from forkpoint.catalog import migration
from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.catalog.schema import HEAD_REVISION, metadata
from forkpoint.errors import (
    CapacityExceeded,
    Conflict,
    Corrupt,
    Error,
    Incompatible,
    InvalidInput,
    NotFound,
    Unavailable,
)
from forkpoint.testing.catalog_contract import MAIN, add, manifest_row, named, point


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    catalog = Catalog.create(sqlite_url(path))
    yield catalog
    catalog.close()


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def code_of(url: str) -> str:
    """The code of the error that opening ``url`` and one query raise."""
    with pytest.raises(Error) as caught:
        Catalog.open(url, busy_timeout_s=0.1).refs()
    return caught.value.code


def write(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


# Settings


def test_every_connection_is_durable_and_checks_foreign_keys(catalog: Catalog) -> None:
    with catalog._reading() as first, catalog._writing() as second:
        for connection in (first, second):
            for pragma, value in {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}.items():
                assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value


def test_a_writer_waits_half_a_minute_unless_told_otherwise(catalog: Catalog) -> None:
    with catalog._writing() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 30_000


def test_only_the_owner_can_read_the_files(path: Path) -> None:
    before = os.umask(0)
    try:
        catalog = Catalog.create(sqlite_url(path))
        add(catalog, manifest_row("a"))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        catalog.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(["catalog.sqlite", "catalog.sqlite-shm", "catalog.sqlite-wal"], 0o600)


def test_a_path_of_odd_characters_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a ?b#c%20d&e=ö.sqlite"
    catalog = Catalog.create(sqlite_url(path))
    catalog.close()
    assert path in tmp_path.iterdir()
    Catalog.open(sqlite_url(path)).close()


def test_the_schema_holds_no_floats() -> None:
    kinds = {type(column.type).__name__ for table in metadata.tables.values() for column in table.columns}
    assert kinds <= {"BigInteger", "Integer", "Digest", "String", "Text", "Boolean"}


def test_time_never_runs_backwards_along_the_numbers(catalog: Catalog, path: Path) -> None:
    write(path, "UPDATE counter SET at_us = 9000000000000000")
    with catalog.transaction(reason="the clock was set back") as tx:
        assert tx.at_us == 9_000_000_000_000_000


# Opening


def test_a_catalog_is_there_again_after_it_was_closed(catalog: Catalog, path: Path) -> None:
    add(catalog, manifest_row("a"))
    catalog.close()
    again = Catalog.open(sqlite_url(path))
    assert again.get_manifest(named("a")) == manifest_row("a")
    again.close()


def test_a_closed_catalog_refuses_every_use(catalog: Catalog) -> None:
    catalog.close()
    catalog.close()
    with pytest.raises(InvalidInput) as caught:
        catalog.refs()
    assert caught.value.code == "invalid_input.closed"
    with pytest.raises(InvalidInput), catalog.transaction(reason="too late"):
        pass


def test_opening_what_is_not_there_creates_nothing(path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        Catalog.open(sqlite_url(path))
    assert caught.value.code == "not_found.catalog"
    assert not path.exists()


def test_creating_over_a_catalog_is_a_conflict_and_leaves_it_alone(catalog: Catalog, path: Path) -> None:
    add(catalog, manifest_row("a"))
    with pytest.raises(Conflict) as caught:
        Catalog.create(sqlite_url(path))
    assert caught.value.code == "conflict.catalog"
    assert catalog.counts().num_manifests == 1


def test_a_creation_that_was_interrupted_can_be_repeated(path: Path) -> None:
    path.touch()
    Catalog.create(sqlite_url(path)).close()
    Catalog.open(sqlite_url(path)).close()


def test_creating_in_an_absent_folder_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        Catalog.create(sqlite_url(tmp_path / "absent" / "catalog.sqlite"))


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/name"])
def test_a_database_that_cannot_keep_a_catalog_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Catalog.create(url)
    assert caught.value.code == "invalid_input.catalog_url"


def test_opening_imports_no_alembic(catalog: Catalog, path: Path) -> None:
    done = run(
        """
        import sys
        from forkpoint.catalog.catalog import Catalog
        Catalog.open(sys.argv[1]).refs()
        print("alembic" in sys.modules)
        """,
        sqlite_url(path),
    )
    assert done.stdout == "False\n", done.stderr


# Versions


def test_the_migrations_lead_to_the_schema(catalog: Catalog) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    with catalog._reading() as connection:
        assert migration.find_stamp(connection) == HEAD_REVISION
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_an_older_catalog_is_migrated_when_it_is_opened(path: Path) -> None:
    write(path, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    catalog = Catalog.open(sqlite_url(path))
    add(catalog, manifest_row("a"))
    assert catalog.check() == []
    catalog.close()


def test_a_newer_catalog_is_refused_with_both_versions(catalog: Catalog, path: Path) -> None:
    add(catalog, manifest_row("a"))
    catalog.close()
    write(path, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(Incompatible) as caught:
        Catalog.open(sqlite_url(path))
    assert caught.value.code == "incompatible.catalog_version"
    assert caught.value.data == {"field": "catalog_version", "found": "9999", "supported": HEAD_REVISION}


def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    write(
        path,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
        "CREATE TABLE ref (name TEXT)",
    )
    assert code_of(sqlite_url(path)) == "corrupt.catalog"
    with sqlite3.connect(path) as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert tables == {"alembic_version", "ref"}


# Damage


def test_an_empty_file_is_no_empty_catalog(path: Path) -> None:
    path.touch()
    assert code_of(sqlite_url(path)) == "corrupt.catalog"


@pytest.mark.parametrize("content", [b"no database at all" * 1_000, b"SQLite format 3\0" + b"\xff" * 5_000])
def test_a_file_that_is_no_catalog_is_corrupt_and_says_what_to_run(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(Corrupt) as caught:
        Catalog.open(sqlite_url(path))
    assert caught.value.code == "corrupt.catalog"
    assert "forkpoint fsck --rebuild-catalog" in caught.value.message
    assert path.read_bytes() == content


def test_a_missing_table_is_damage(catalog: Catalog, path: Path) -> None:
    catalog.close()
    write(path, "DROP TABLE ref")
    assert code_of(sqlite_url(path)) == "corrupt.catalog"


def test_overwritten_pages_are_found(catalog: Catalog, path: Path) -> None:
    add(catalog, *(manifest_row(str(i), chunks=(f"chunk {i}",)) for i in range(500)))
    catalog.close()
    content = bytearray(path.read_bytes())
    content[40 * 4096 : 60 * 4096] = b"\xa5" * (20 * 4096)
    path.write_bytes(content)
    damaged = Catalog.open(sqlite_url(path))
    assert any(finding.startswith("catalog_page: ") for finding in damaged.check())
    damaged.close()


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("UPDATE manifest SET removed_tx = 1", "ref_target_absent"),
        ("UPDATE chunk SET removed_tx = 1", "chunk_absent"),
        ("DELETE FROM move", "ref_move_absent"),
        ("UPDATE counter SET tx = 0", "counter_behind"),
        ("DELETE FROM manifest", "catalog_page"),
    ],
)
def test_a_broken_invariant_is_found(catalog: Catalog, path: Path, damage: str, code: str) -> None:
    add(catalog, manifest_row("a", chunks=("one",)))
    with catalog.transaction(reason="branch") as tx:
        point(tx, MAIN, "a")
    assert catalog.check() == []
    write(path, damage)
    assert code in {finding.partition(":")[0] for finding in catalog.check()}


def test_two_live_values_of_a_ref_are_found(catalog: Catalog, path: Path) -> None:
    add(catalog, manifest_row("a"))
    with catalog.transaction(reason="branch") as tx:
        point(tx, MAIN, "a")
    with pytest.raises(sqlite3.IntegrityError):
        write(path, "INSERT INTO ref SELECT 99, name, target, symbolic, move_id, 1, NULL FROM ref")
    write(
        path, "DROP INDEX uq_ref_live", "INSERT INTO ref SELECT 99, name, target, symbolic, move_id, 1, NULL FROM ref"
    )
    assert any(finding.startswith("ref_repeated: ") for finding in catalog.check())


# Refusals


def test_a_writer_that_waits_too_long_is_told_that_the_catalog_is_busy(catalog: Catalog, path: Path) -> None:
    hasty = Catalog.open(sqlite_url(path), busy_timeout_s=0.05)
    with catalog.transaction(reason="slow"):
        with pytest.raises(Unavailable) as caught, hasty.transaction(reason="hasty"):
            pass
        assert hasty.current_tx() == 0  # readers do not wait
    assert caught.value.code == "unavailable.catalog_busy"
    with hasty.transaction(reason="now") as tx:
        assert tx.number == 2
    hasty.close()


def test_a_writer_holds_the_lock_before_it_has_written(catalog: Catalog, path: Path) -> None:
    hasty = Catalog.open(sqlite_url(path), busy_timeout_s=0.05)
    with catalog._writing(), pytest.raises(Unavailable), hasty.transaction(reason="hasty"):
        pass
    hasty.close()


def test_a_full_disk_is_a_typed_error_and_changes_nothing(catalog: Catalog) -> None:
    @event.listens_for(catalog._engines.read, "connect")
    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 60")

    catalog._engines.dispose()  # the next use connects again, with the limit
    with pytest.raises(CapacityExceeded) as caught:
        add(catalog, *(manifest_row(str(i)) for i in range(2_000)))
    assert caught.value.code == "capacity.disk"
    assert catalog.current_tx() == 0
    assert catalog.check() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_typed_error(catalog: Catalog, path: Path) -> None:
    catalog.close()
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        assert code_of(sqlite_url(path)).startswith("unavailable.catalog")
    finally:
        path.parent.chmod(0o700)


def test_a_catalog_that_cannot_be_written_says_so(catalog: Catalog) -> None:
    with catalog._reading() as connection:
        connection.exec_driver_sql("PRAGMA query_only = 1")
        with pytest.raises(Unavailable) as caught:
            connection.exec_driver_sql("UPDATE counter SET tx = 7")
    assert caught.value.code == "unavailable.catalog_readonly"


@pytest.mark.parametrize("message", ["half \ud83d a character"])
def test_text_that_no_database_can_hold_is_refused(catalog: Catalog, message: str) -> None:
    with pytest.raises(InvalidInput) as caught, catalog.transaction(reason=message):
        pass
    assert caught.value.code == "invalid_input.catalog_value"


def test_a_number_that_no_database_can_hold_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidInput) as caught:
        catalog.tx_at(1 << 70)
    assert caught.value.code == "invalid_input.catalog_value"


# Processes

COMPARE_AND_SET = """
    import sys
    from forkpoint.catalog.catalog import Catalog
    from forkpoint.errors import Conflict
    from forkpoint.testing.catalog_contract import MAIN, manifest_row, named, point

    url, who, num_wins = sys.argv[1], sys.argv[2], int(sys.argv[3])
    catalog = Catalog.open(url)
    wins = losses = 0
    while wins < num_wins:
        seen = catalog.find_ref(MAIN).move_id
        name = f"{who} {wins}"
        try:
            with catalog.transaction(reason=name) as tx:
                if tx.find_ref(MAIN).move_id != seen:
                    raise Conflict("somebody else moved first", code="ref")
                tx.add_manifest(manifest_row(name))
                point(tx, MAIN, name)
            wins += 1
        except Conflict:
            losses += 1
            assert catalog.find_ref(MAIN).move_id != seen, "the loser does not see the winner"
    print(losses)
"""


def test_processes_that_compare_and_set_one_ref_lose_no_accepted_move(catalog: Catalog, path: Path) -> None:
    add(catalog, manifest_row("start"))
    with catalog.transaction(reason="branch") as tx:
        point(tx, MAIN, "start")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(COMPARE_AND_SET), sqlite_url(path), who, "60"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for who in ("left", "right")
    ]
    losses = [int(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sum(losses) > 0, "the processes never met, so this shows nothing"
    moves = catalog.moves(MAIN)
    expected = {named("start")} | {named(f"{who} {i}") for who in ("left", "right") for i in range(60)}
    assert {move.new for move in moves} == expected
    assert len(moves) == len(expected)
    for move, before in pairwise(moves):
        assert (move.previous, move.old) == (before.move_id, before.new)
    assert catalog.check() == []


def test_a_process_killed_in_a_transaction_leaves_nothing_behind(catalog: Catalog, path: Path) -> None:
    done = run(
        """
        import os, signal, sys
        from forkpoint.catalog.catalog import Catalog
        from forkpoint.testing.catalog_contract import MAIN, manifest_row, point

        with Catalog.open(sys.argv[1]).transaction(reason="killed") as tx:
            tx.add_manifests(manifest_row(str(i)) for i in range(3_000))
            point(tx, MAIN, "0")
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        sqlite_url(path),
    )
    assert done.returncode == -9, done.stderr
    assert catalog.counts().num_manifests == 0
    assert catalog.check() == []
    assert add(catalog, manifest_row("a")) == 1
