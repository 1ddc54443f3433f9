from __future__ import annotations

from pathlib import Path

import pytest
from tests.repo.drafts import draft_of, fingerprint_of

from forkpoint.errors import Corrupt, NotFound, Unavailable
from forkpoint.ids import MoveId, ObjectId, ObjectKind, digest_of
from forkpoint.repo.chains import committed_moves, trusted_manifests
from forkpoint.repo.repository import Repository
from forkpoint.state.manifest import Manifest, Parent, manifest_id
from forkpoint.state.move import Move, encode_move

TOKENS = list(range(600))


def facts_of(repo: Repository) -> dict[str, object]:
    """Everything that a rebuild must bring back, in a form that two catalogs can be compared in."""
    rows = {row.manifest_id: row for row in repo.catalog.manifests()}
    found = repo.find_prefix(fingerprint_of(), TOKENS, ["attention"])
    return {
        "manifests": {
            each: (row.position, row.num_bytes, row.is_trusted, row.parents, row.introduced)
            for each, row in rows.items()
        },
        "refs": {row.name: row.target or row.symbolic for row in repo.catalog.refs()},
        "reflogs": {
            name: [
                (entry.manifest_id, entry.move.move_id, entry.move.at_us, entry.move.message)
                for entry in repo.reflog(name)
            ]
            for name in ("main", "side", "HEAD")
        },
        "prefix": found,
    }


def busy_history(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS), branch="main", message="one").manifest_id
    second = repo.publish(draft_of([*TOKENS, 1], parent=first), branch="main", message="two").manifest_id
    repo.branch("side", first)
    repo.publish(draft_of([*TOKENS, 2], parent=first), branch="side")
    repo.tag("v1", second)
    repo.publish(draft_of([5, 6], is_trusted=False), branch="foreign")
    repo.delete_branch("side")
    repo.branch("side", second)
    repo.checkout("side")


def test_a_rebuilt_catalog_says_what_the_lost_one_said(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
        before = facts_of(repo)
    for path in (tmp_path / ".forkpoint").glob("catalog.db*"):
        path.unlink()
    with pytest.raises(NotFound, match="fsck --rebuild-catalog"):
        Repository.open(tmp_path)
    report = Repository.rebuild_catalog(tmp_path)
    assert (report.num_manifests, report.num_trusted, report.problems) == (4, 3, ())
    with Repository.open(tmp_path) as repo:
        assert facts_of(repo) == before
        assert repo.check() == []
        repo.collect()
        assert repo.check() == []


def test_a_log_that_a_lost_catalog_left_is_not_read_into_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / ".forkpoint/catalog.db"
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
        before = facts_of(repo)
        log = path.with_name("catalog.db-wal").read_bytes()
    path.unlink()
    path.with_name("catalog.db-wal").write_bytes(log)
    Repository.rebuild_catalog(tmp_path)
    with Repository.open(tmp_path) as repo:
        assert facts_of(repo) == before
        assert repo.check() == []


def test_a_rebuild_replaces_a_damaged_catalog_and_keeps_it(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
    path = tmp_path / ".forkpoint/catalog.db"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(Corrupt):
        Repository.open(tmp_path)
    Repository.rebuild_catalog(tmp_path)
    assert path.with_name("catalog.db.bak").read_bytes().startswith(b"not a database")
    with Repository.open(tmp_path) as repo:
        assert repo.head().branch == "side"


def test_an_open_repository_is_not_rebuilt_under_its_users(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
        with pytest.raises(Unavailable) as caught:
            Repository.rebuild_catalog(tmp_path)
        assert caught.value.code == "unavailable.repository_in_use"
        repo.publish(draft_of([8, 9]), branch="new")
    Repository.rebuild_catalog(tmp_path)


def test_a_ref_whose_manifest_is_incomplete_goes_back(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        first = repo.publish(draft_of(TOKENS), branch="main").manifest_id
        second = repo.publish(draft_of([*TOKENS, 1], parent=first), branch="main").manifest_id
        repo.store.delete(ObjectKind.MANIFEST, second)
    report = Repository.rebuild_catalog(tmp_path)
    assert any("went back" in problem for problem in report.problems)
    with Repository.open(tmp_path) as repo:
        assert repo.resolve("main") == first
        assert [entry.manifest_id for entry in repo.reflog("main")] == [first, second, first]


def test_rebuilding_twice_changes_nothing_more(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
    Repository.rebuild_catalog(tmp_path)
    with Repository.open(tmp_path) as repo:
        before = facts_of(repo)
    Repository.rebuild_catalog(tmp_path)
    with Repository.open(tmp_path) as repo:
        assert facts_of(repo) == before
        repo.publish(draft_of([3, 4, 5]), branch="later")
        assert repo.check() == []


def test_a_move_that_is_lost_after_a_rebuild_is_written_again(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
        repo.branch("z", "v1")
        before = repo.catalog.moves()
    Repository.rebuild_catalog(tmp_path)
    with Repository.open(tmp_path) as repo:
        assert {each.move_id: each for each in repo.catalog.moves()} == {each.move_id: each for each in before}
        lost = repo.reflog("z")[0].move.move_id
        repo.store.delete(ObjectKind.MOVE, lost)
        repo.repair(repo.check())
        assert repo.store.has(ObjectKind.MOVE, lost)
        assert repo.check() == []


def test_moves_made_after_a_rebuild_come_after_those_before_it(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        busy_history(repo)
        last_tx = repo.catalog.current_tx()
    Repository.rebuild_catalog(tmp_path)
    with Repository.open(tmp_path) as repo:
        assert repo.catalog.current_tx() >= last_tx
        repo.checkout("main")
        later = repo.publish(draft_of([*TOKENS, 1, 9], parent=repo.resolve("main")), branch="main").manifest_id
        before = facts_of(repo)
    Repository.rebuild_catalog(tmp_path)
    with Repository.open(tmp_path) as repo:
        assert repo.resolve("HEAD") == later
        assert facts_of(repo) == before


# The rules, on values


def move(
    tx: int, previous: MoveId | None, *, at_us: int = 0, new: str | None = None, trusted: bool = True
) -> tuple[MoveId, Move]:
    value = Move(
        ref="refs/heads/main",
        old=None,
        new=new,
        previous=previous,
        tx=tx,
        at_us=at_us,
        who="w",
        message="",
        is_trusted=trusted,
    )
    return digest_of([encode_move(value)]), value


def test_a_move_with_successors_beats_a_later_one_that_never_was() -> None:
    first, orphan = move(1, None), move(9, None, at_us=9)
    second = move(2, first[0])
    assert committed_moves(dict([orphan, second, first])) == [first, second]


def test_among_moves_without_successors_the_latest_wins() -> None:
    first = move(1, None)
    retried, given_up = move(2, first[0], at_us=8), move(2, first[0], at_us=5)
    assert committed_moves(dict([first, given_up, retried])) == [first, retried]


def test_a_lost_move_leaves_a_gap_and_not_an_end() -> None:
    first = move(1, None)
    lost = move(2, first[0])
    third = move(3, lost[0])
    fourth = move(4, third[0])
    assert committed_moves(dict([fourth, first, third])) == [first, third, fourth]


def test_a_chain_keeps_its_order_even_where_numbers_ran_backwards() -> None:
    first = move(9, None)
    second = move(2, first[0])
    third = move(3, second[0])
    assert committed_moves(dict([third, first, second])) == [first, second, third]


def chain_of(*roles: str) -> list[tuple[ObjectId, Manifest]]:
    """Manifests, each with the one before as parent in the given role."""
    made: list[tuple[ObjectId, Manifest]] = []
    for index, role in enumerate(("", *roles)):
        parents = (Parent(role=role, manifest_id=made[-1][0]),) if made else ()
        value = Manifest(kind="llm", fingerprint=fingerprint_of(), boundary={"i": index}, groups=(), parents=parents)
        made.append((manifest_id(value), value))
    return made


def test_trust_goes_back_along_what_is_continued() -> None:
    (a, _), (b, _), (c, _) = chain = chain_of("continues", "continues")
    moves = [move(1, None, new=c)[1]]
    assert trusted_manifests(dict(chain), moves) == {a, b, c}


def test_trust_stops_at_what_came_from_outside() -> None:
    (a, _), (b, _), (c, _) = chain = chain_of("continues", "continues")
    foreign = move(1, None, new=b, trusted=False)[1]
    assert trusted_manifests(dict(chain), [foreign, move(2, None, new=c)[1]]) == {c}
    verified = move(3, None, new=b)[1]
    assert trusted_manifests(dict(chain), [foreign, verified]) == {a, b}


def test_trust_does_not_follow_an_adoption() -> None:
    (_, _), (b, _) = chain = chain_of("adopts")
    assert trusted_manifests(dict(chain), [move(1, None, new=b)[1]]) == {b}


def test_what_no_move_names_is_not_trusted() -> None:
    chain = chain_of("continues")
    assert trusted_manifests(dict(chain), []) == frozenset()
