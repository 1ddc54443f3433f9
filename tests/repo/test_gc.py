from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.repo.drafts import draft_of

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.errors import Conflict, InvalidInput, NotFound
from forkpoint.ids import ManifestId, ObjectKind
from forkpoint.repo import gc
from forkpoint.repo.repository import Repository
from forkpoint.store.local import LocalStore
from forkpoint.testing.faulty_store import Fault, FaultyStore, Moment, Step

TOKENS = list(range(600))
LONGER = [*TOKENS, *range(300)]


def errors_of(repo: Repository) -> list[str]:
    return [f"{each.code} {each.subject}: {each.message}" for each in repo.check() if each.severity != "info"]


def assert_whole(repo: Repository, *names: str) -> None:
    for name in names:
        repo.verify(name)
    assert errors_of(repo) == []


def abandoned(repo: Repository) -> ManifestId:
    """A published manifest that nothing keeps."""
    return repo.publish(draft_of(LONGER, model="other")).manifest_id


def test_what_a_ref_leads_to_is_kept_and_the_rest_goes(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS), branch="main").manifest_id
    second = repo.publish(draft_of(LONGER, parent=first), branch="main").manifest_id
    lost = abandoned(repo)
    plan = repo.plan_collection()
    assert (plan.count(ObjectKind.MANIFEST), plan.count(ObjectKind.CHUNK)) == (1, 4)
    done = repo.collect()
    assert (done.deleted[ObjectKind.MANIFEST], done.deleted[ObjectKind.CHUNK]) == (1, 4)
    assert done.bytes_deleted == plan.num_bytes
    assert_whole(repo, first, second)
    with pytest.raises(NotFound):
        repo.resolve(lost)
    assert repo.plan_collection().objects == ()
    assert repo.collect().num_doomed == 0


def test_a_deleted_branch_is_kept_by_its_reflog(repo: Repository) -> None:
    kept = repo.publish(draft_of(TOKENS), branch="side").manifest_id
    repo.delete_branch("side")
    repo.collect()
    assert_whole(repo, kept)
    assert repo.resolve("side@{1}") == kept


def test_a_lease_keeps_a_manifest_while_it_runs(repo: Repository) -> None:
    leased = abandoned(repo)
    with repo.lease(leased):
        repo.collect()
        repo.verify(leased)
    repo.collect()
    with pytest.raises(NotFound), repo.lease(leased):
        pass


def test_a_lease_is_renewed_while_its_block_runs(repo: Repository) -> None:
    leased = abandoned(repo)
    with repo.lease(leased, ttl_s=1.2):
        time.sleep(2)
        repo.collect()
        repo.verify(leased)
    assert repo.catalog.num_leases() == 0


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), float("-inf"), -1.0, 0.0])
def test_a_lease_of_no_sound_length_is_refused(repo: Repository, ttl_s: float) -> None:
    leased = abandoned(repo)
    with pytest.raises(InvalidInput) as caught, repo.lease(leased, ttl_s=ttl_s):
        pass
    assert caught.value.code == "invalid_input.ttl"
    assert repo.catalog.num_leases() == 0


def test_leftovers_of_a_crash_go(repo: Repository) -> None:
    repo.publish(draft_of(TOKENS, tokenizer=b"{}"), branch="main")

    def crash() -> None:
        raise NotFound("as if the process had died", code="test")

    with pytest.raises(NotFound):
        repo.publish(draft_of(LONGER, tokenizer=b"[]", check=crash), branch="main")
    assert [each.severity for each in repo.check()] == ["info", "info"]
    done = repo.collect()
    assert (done.deleted[ObjectKind.CHUNK], done.deleted[ObjectKind.TOKENIZER]) == (2, 1)
    assert repo.check() == []


def test_a_plan_limits_what_goes(repo: Repository) -> None:
    planned = repo.publish(draft_of(TOKENS, model="a")).manifest_id
    plan = repo.plan_collection()
    child = repo.publish(draft_of(LONGER, model="a", parent=planned)).manifest_id
    repo.collect(plan)
    assert_whole(repo, planned, child)  # the child came after the plan, and keeps what it descends from
    repo.collect()
    assert repo.catalog.counts().num_manifests == 0


def test_a_branch_made_between_dooming_and_deletion_brings_the_manifest_and_its_ancestors_back(
    repo: Repository,
) -> None:
    first = repo.publish(draft_of(TOKENS, tokenizer=b"{}")).manifest_id
    second = repo.publish(draft_of(LONGER, parent=first, tokenizer=b"{}")).manifest_id
    gc.doom_garbage(repo._backing, None)
    assert repo.catalog.counts().num_manifests == 0
    repo.branch("saved", second)
    gc.delete_doomed(repo._backing)
    assert_whole(repo, "saved", "saved~1")
    assert repo.resolve("saved~1") == first
    assert repo.row(first).is_trusted
    repo.collect()
    assert_whole(repo, "saved", "saved~1")


def test_a_branch_on_what_was_deleted_is_refused(repo: Repository) -> None:
    lost = abandoned(repo)
    repo.collect()
    with pytest.raises(NotFound):
        repo.branch("saved", lost)
    assert repo.branches() == []


def test_what_was_purged_does_not_come_back(repo: Repository) -> None:
    purged = abandoned(repo)
    repo.catalog.purge(purged, reason="asked for")
    with pytest.raises(NotFound):
        repo.branch("saved", purged)
    repo.collect()
    assert errors_of(repo) == []


def test_a_purge_deletes_the_bytes_at_once_and_is_refused_while_a_ref_needs_them(repo: Repository) -> None:
    kept = repo.publish(draft_of(TOKENS), branch="main").manifest_id
    with pytest.raises(Conflict):
        repo.purge("main", reason="asked for")
    lost = repo.publish(draft_of(LONGER)).manifest_id
    assert repo.purge(lost, reason="asked for") == 3  # its manifest and the two chunks that main does not have
    assert not repo.store.has(ObjectKind.MANIFEST, lost)
    assert_whole(repo, kept)
    with pytest.raises(NotFound):
        repo.branch("saved", lost)


def test_a_purge_counts_and_deletes_only_what_is_its_own(repo: Repository) -> None:
    abandoned(repo)
    gc.doom_garbage(repo._backing, None)
    num_pending = len(repo.catalog.doomed())
    purged = repo.publish(draft_of(TOKENS, model="third")).manifest_id
    assert repo.purge(purged, reason="asked for") == 4
    assert len(repo.catalog.doomed()) == num_pending == 5


@pytest.mark.parametrize(("branch", "is_kept"), [(None, False), ("side", True)])
def test_a_purge_leaves_a_message_only_in_moves(tmp_path: Path, branch: str | None, is_kept: bool) -> None:
    with Repository.create(tmp_path) as repo:
        purged = repo.publish(draft_of(TOKENS), branch=branch, message="a secret that was said").manifest_id
        if branch is not None:
            repo.delete_branch(branch)
        repo.purge(purged, reason="asked for")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and b"a secret that was said" in path.read_bytes()]
    assert bool(files) is is_kept
    assert {path.parent.parent.name for path in files} <= {"moves", tmp_path.name}


def test_publishing_what_was_doomed_or_deleted_writes_it_again(repo: Repository) -> None:
    for step in (lambda: gc.doom_garbage(repo._backing, None), repo.collect):
        repo.publish(draft_of(TOKENS))
        step()
        again = repo.publish(draft_of(TOKENS), branch="main", expect="anything")
        repo.collect()
        assert_whole(repo, again.manifest_id)
        repo.publish(draft_of([1, 2]), branch="main", expect="anything")


def test_marks_of_deletions_are_dropped_after_a_day(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned(repo)
    repo.collect()
    assert len(repo.catalog.doomed(pending_only=False)) == 5
    monkeypatch.setattr(gc, "TOMBSTONE_KEPT_S", -1)
    repo.collect()
    assert repo.catalog.doomed(pending_only=False) == []


STEPS: list[tuple[Step, int, Moment]] = [
    ("put_many", 1, "before"),
    ("put_many.object", 1, "before"),
    ("put_many.object", 2, "before"),
    ("put_many.object", 2, "after"),
    ("put_many", 1, "after"),
    ("put", 1, "before"),
    ("put", 1, "after"),
]


@pytest.mark.parametrize(("step", "nth", "moment"), STEPS)
@pytest.mark.parametrize("num_collected", ["doomed", "deleted"])
def test_collection_at_any_step_of_a_publication_loses_nothing(
    memory_path: Path, step: Step, nth: int, moment: Moment, num_collected: str
) -> None:
    """The draft shares two chunks with a manifest that nothing keeps: they are relied on, not put, and then collected."""
    with Repository.create(memory_path) as other:
        other.publish(draft_of([5, 6, 7]), branch="main")
        abandoned_prefix = other.publish(draft_of(TOKENS)).manifest_id

        def collect() -> None:
            other.collect() if num_collected == "deleted" else gc.doom_garbage(other._backing, None)

        with open_beside(memory_path, Fault(step=step, nth=nth, moment=moment, effect=collect)) as repo:
            published = repo.publish(draft_of(LONGER, parent=abandoned_prefix), branch="side")
        gc.delete_doomed(other._backing)
        assert_whole(other, "side", "main")
        assert other.resolve("side") == published.manifest_id
        other.collect()
        assert_whole(other, "side", "main")


GC_STEPS: list[tuple[Step, int, Moment]] = [("scan", n, moment) for n in range(1, 5) for moment in ("before", "after")]


@pytest.mark.parametrize(("step", "nth", "moment"), GC_STEPS)
def test_a_publication_at_any_step_of_a_collection_is_kept(
    memory_path: Path, step: Step, nth: int, moment: Moment
) -> None:
    with Repository.create(memory_path) as other:
        other.publish(draft_of(TOKENS))  # garbage that the publication shares chunks with

        def publish() -> None:
            other.publish(draft_of(LONGER), branch="main")

        with open_beside(memory_path, Fault(step=step, nth=nth, moment=moment, effect=publish)) as repo:
            repo.collect()
        assert_whole(other, "main")


def test_a_publication_between_dooming_and_deletion_is_kept(memory_path: Path) -> None:
    publishers: list[Callable[[Repository], object]] = [
        lambda repo: repo.publish(draft_of(LONGER), branch="main"),
        lambda repo: repo.publish(draft_of(TOKENS), branch="main"),
        lambda repo: repo.commit_bundle(bundle, branch="main"),
    ]
    with Repository.create(memory_path / "origin") as origin:
        origin.publish(draft_of(TOKENS), branch="main")
        bundle = b"".join(origin.export_bundle("main"))
    for index, publish in enumerate(publishers):
        with Repository.create(memory_path / str(index)) as repo:
            repo.publish(draft_of(TOKENS))
            gc.doom_garbage(repo._backing, None)
            publish(repo)
            gc.delete_doomed(repo._backing)
            assert_whole(repo, "main")


def open_beside(path: Path, *faults: Fault) -> Repository:
    """The same repository through a store with faults, on connections of its own."""
    folder = path / ".forkpoint"
    store = FaultyStore(LocalStore(folder / "objects"), *faults)
    return Repository(store=store, catalog=Catalog.open(sqlite_url(folder / "catalog.db")))
