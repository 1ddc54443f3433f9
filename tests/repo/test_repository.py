from __future__ import annotations

import json
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tests.repo.drafts import draft_of

from forkpoint.catalog.catalog import Catalog
from forkpoint.config import Config
from forkpoint.errors import Conflict, Corrupt, Incompatible, InvalidInput, NotFound, Unavailable
from forkpoint.repo.repository import Repository


def test_a_new_repository_is_private_and_complete(tmp_path: Path) -> None:
    with Repository.create(tmp_path, namespace="team") as repo:
        assert repo.folder == tmp_path / ".forkpoint"
        assert repo.namespace == "team"
    assert stat.S_IMODE((tmp_path / ".forkpoint").stat().st_mode) == 0o700
    for name in ("config.json", "catalog.db"):
        assert stat.S_IMODE((tmp_path / ".forkpoint" / name).stat().st_mode) == 0o600
    config = json.loads((tmp_path / ".forkpoint/config.json").read_text())
    assert (config["version"], len(config["repository_id"])) == (1, 32)


def test_creating_twice_is_a_conflict(tmp_path: Path) -> None:
    Repository.create(tmp_path).close()
    with pytest.raises(Conflict) as caught:
        Repository.create(tmp_path)
    assert caught.value.code == "conflict.repository"


def test_creating_while_another_creates_is_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_meanwhile(url: str) -> Catalog:
        monkeypatch.undo()
        with pytest.raises(Conflict, match="somebody else"):
            Repository.create(tmp_path, namespace="second")
        return Catalog.create(url)

    monkeypatch.setattr(Catalog, "create", create_meanwhile)
    with Repository.create(tmp_path, namespace="first") as repo:
        assert repo.namespace == "first"


def test_of_many_who_create_at_once_one_does(tmp_path: Path) -> None:
    def create(namespace: str) -> str | None:
        try:
            Repository.create(tmp_path, namespace=namespace).close()
        except Conflict:
            return None
        return namespace

    with ThreadPoolExecutor(8) as pool:
        made = [name for name in pool.map(create, "abcdefgh") if name is not None]
    with Repository.open(tmp_path) as repo:
        assert made == [repo.namespace]


def test_a_creation_that_was_interrupted_is_completed_by_the_next(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        published = repo.publish(draft_of([1, 2, 3]), branch="main").manifest_id
    (tmp_path / ".forkpoint/config.json").unlink()
    with pytest.raises(NotFound):
        Repository.open(tmp_path)
    with Repository.create(tmp_path) as repo:
        assert repo.resolve("main") == published


def test_a_creation_killed_before_its_catalog_had_tables_is_completed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".forkpoint").mkdir()
    with closing(sqlite3.connect(tmp_path / ".forkpoint/catalog.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    assert (tmp_path / ".forkpoint/catalog.db").stat().st_size > 0
    with Repository.create(tmp_path) as repo:
        assert repo.head().branch == "main"


@pytest.mark.parametrize("left", [None, b"", b"not a database" * 1000])
def test_no_new_repository_is_made_over_objects_whose_catalog_is_lost(tmp_path: Path, left: bytes | None) -> None:
    with Repository.create(tmp_path) as repo:
        published = repo.publish(draft_of([1, 2, 3]), branch="main").manifest_id
    folder = tmp_path / ".forkpoint"
    for path in (folder / "config.json", *folder.glob("catalog.db*")):
        path.unlink()
    if left is not None:
        (folder / "catalog.db").write_bytes(left)
    with pytest.raises(Conflict, match="fsck --rebuild-catalog") as caught:
        Repository.create(tmp_path)
    assert caught.value.code == "conflict.repository"
    with pytest.raises(NotFound, match="fsck --rebuild-catalog"):
        Repository.discover(tmp_path)
    assert Repository.rebuild_catalog(tmp_path).num_manifests == 1
    with Repository.open(tmp_path) as repo:
        assert (repo.namespace, repo.resolve("main")) == ("default", published)
        repo.collect()
        repo.verify("main")


def test_a_repository_is_found_from_below(tmp_path: Path) -> None:
    Repository.create(tmp_path).close()
    below = tmp_path / "a/b"
    below.mkdir(parents=True)
    with Repository.discover(below) as repo:
        assert repo.folder == tmp_path / ".forkpoint"
    with pytest.raises(NotFound, match="forkpoint init"):
        Repository.discover(Path("/proc"))
    with pytest.raises(NotFound):
        Repository.open(below)


def test_a_newer_repository_is_refused(tmp_path: Path) -> None:
    Repository.create(tmp_path).close()
    path = tmp_path / ".forkpoint/config.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(Incompatible) as caught:
        Repository.open(tmp_path)
    assert (caught.value.data["have"], caught.value.data["want"]) == (2, 1)
    with pytest.raises(Conflict):
        Repository.create(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "forkpoint.repository", "version": 1}']
)
def test_damaged_settings_are_reported(tmp_path: Path, text: str) -> None:
    Repository.create(tmp_path).close()
    (tmp_path / ".forkpoint/config.json").write_text(text)
    with pytest.raises(Corrupt):
        Repository.open(tmp_path)


@pytest.mark.parametrize("namespace", ["", "a\nb", "x" * 300, "\ud800"])
def test_a_namespace_that_cannot_be_written_is_refused(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(InvalidInput):
        Repository.create(tmp_path, namespace=namespace)
    assert not (tmp_path / ".forkpoint").exists()


def test_a_place_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable):
        Repository.create(tmp_path / "file")


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    repo = Repository.create(tmp_path)
    repo.close()
    repo.close()


def test_who_comes_from_the_environment_unless_given() -> None:
    config = Config.from_environment({"FORKPOINT_WHO": "ada", "FORKPOINT_DIR": "/x", "XDG_CACHE_HOME": "/c"})
    assert (config.who, config.repository_dir, config.cache_dir) == ("ada", Path("/x"), Path("/c/forkpoint"))
    bare = Config.from_environment({"FORKPOINT_CACHE_DIR": "/d", "FORKPOINT_DIR": ""})
    assert "@" in bare.who
    assert (bare.repository_dir, bare.cache_dir) == (None, Path("/d"))


def test_moves_are_signed_with_who(tmp_path: Path) -> None:
    with Repository.create(tmp_path, who="ada") as repo:
        repo.publish(draft_of([1, 2]), branch="main", message="hello")
        move = repo.reflog("main")[0].move
        assert (move.who, move.message) == ("ada", "hello")
