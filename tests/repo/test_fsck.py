from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.repo.drafts import draft_of
from tests.repo.test_contents import flip_byte

from forkpoint.errors import NotFound
from forkpoint.ids import ManifestId, ObjectId, ObjectKind
from forkpoint.repo.fsck import Finding
from forkpoint.repo.repository import Repository
from forkpoint.store.base import NewObject
from forkpoint.store.local import LocalStore

TOKENS = list(range(700))


@pytest.fixture
def chain(repo: Repository) -> list[ManifestId]:
    """Three manifests on main; each adds a full chunk, and has a tail of its own."""
    ids: list[ManifestId] = []
    for length in (300, 600, 700):
        draft = draft_of(TOKENS[:length], parent=ids[-1] if ids else None, tokenizer=b"{}")
        ids.append(repo.publish(draft, branch="main").manifest_id)
    repo.tag("start", "main~2")
    return ids


def tail_of(repo: Repository, manifest_id: ManifestId) -> ObjectId:
    return repo.manifest(manifest_id).groups[0].chunks[-1].chunk_id


def codes(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(each.code, each.severity) for each in findings]


def test_a_sound_repository_has_no_findings_and_progress_reaches_the_end(
    repo: Repository, chain: list[ManifestId]
) -> None:
    seen: list[tuple[int, int]] = []
    assert repo.check(lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert repo.repair([]) == []


def test_a_damaged_chunk_costs_only_the_manifests_that_need_it(repo: Repository, chain: list[ManifestId]) -> None:
    flip_byte(repo, tail_of(repo, chain[2]))
    findings = repo.check()
    assert codes(findings) == [("object_corrupt", "error")]
    done = repo.repair(findings)
    assert any("moved back" in line for line in done)
    assert repo.resolve("main") == chain[1]
    assert repo.reflog("main")[0].move.message.startswith("fsck")
    assert [each.severity for each in repo.check()] == ["info"]  # what is left of the withdrawn manifest
    assert repo.folder is not None
    assert len(list((repo.folder / "quarantine").iterdir())) == 1
    assert repo.resolve("main@{1}") == chain[2]
    with pytest.raises(NotFound):
        repo.row(chain[2])


def test_what_is_healed_just_before_it_is_moved_aside_stays(
    repo: Repository, chain: list[ManifestId], monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = tail_of(repo, chain[2])
    sound = bytes(repo.store.get(ObjectKind.CHUNK, tail))
    flip_byte(repo, tail)
    findings = repo.check()
    verify = LocalStore.verify

    def verify_then_heal(store: LocalStore, kind: ObjectKind, object_id: ObjectId) -> None:
        try:
            verify(store, kind, object_id)
        finally:
            store.put(NewObject(kind=kind, parts=[sound]))

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "verify", verify_then_heal)
        assert repo.repair(findings) == []
    assert repo.resolve("main") == chain[2]
    assert repo.check() == []
    assert repo.folder is not None
    assert list((repo.folder / "quarantine").iterdir()) == []


def test_publishing_the_same_again_heals(repo: Repository, chain: list[ManifestId]) -> None:
    flip_byte(repo, tail_of(repo, chain[2]))
    repo.repair(repo.check())
    repo.publish(draft_of(TOKENS, parent=chain[1], tokenizer=b"{}"), branch="main")
    assert repo.resolve("main") == chain[2]
    assert repo.check() == []


def test_a_lost_parent_leaves_its_children_whole(repo: Repository, chain: list[ManifestId]) -> None:
    """The tail of the middle one is lost; the last one does not need it, but does need what the middle one introduced."""
    repo.store.delete(ObjectKind.CHUNK, tail_of(repo, chain[1]))
    findings = repo.check()
    assert codes(findings) == [("object_missing", "error")]
    repo.repair(findings)
    assert repo.resolve("main") == chain[2]
    with pytest.raises(NotFound):
        repo.resolve("main~1")
    assert [each.severity for each in repo.check()] == ["info"]
    repo.collect()
    repo.verify("main")
    repo.verify("start")
    assert repo.check() == []


def test_a_lost_manifest_moves_its_refs_back_or_removes_them(repo: Repository, chain: list[ManifestId]) -> None:
    repo.store.delete(ObjectKind.MANIFEST, chain[2])
    repo.store.delete(ObjectKind.MANIFEST, chain[0])
    repo.repair(repo.check())
    assert repo.resolve("main") == chain[1]
    assert repo.tags() == []
    repo.collect()
    repo.verify("main")
    assert repo.check() == []


def test_a_detached_head_on_lost_bytes_goes_back_to_main(repo: Repository) -> None:
    lost = repo.publish(draft_of(TOKENS)).manifest_id
    repo.checkout(lost)
    repo.store.delete(ObjectKind.MANIFEST, lost)
    repo.repair(repo.check())
    assert repo.head().branch == "main"


def test_a_damaged_or_lost_move_is_written_again(repo: Repository, chain: list[ManifestId]) -> None:
    move_ids = [entry.move.move_id for entry in repo.reflog("main")]
    repo.store.delete(ObjectKind.MOVE, move_ids[1])
    assert repo.folder is not None
    path = repo.folder / "objects/moves" / move_ids[0][3:5] / f"{move_ids[0][5:]}.json"
    path.write_bytes(b"{}")
    findings = repo.check()
    assert sorted(codes(findings)) == [("object_corrupt", "error"), ("object_missing", "warning")]
    assert len([line for line in repo.repair(findings) if line.startswith("wrote move")]) == 2
    assert repo.check() == []


def test_a_lost_tokenizer_is_a_warning(repo: Repository, chain: list[ManifestId]) -> None:
    tokenizer_id = repo.row(chain[0]).tokenizer_id
    assert tokenizer_id is not None
    repo.store.delete(ObjectKind.TOKENIZER, tokenizer_id)
    assert codes(repo.check()) == [("object_missing", "warning")]


def test_a_chunk_that_the_catalog_forgot_is_entered_again(repo: Repository, chain: list[ManifestId]) -> None:
    with repo.catalog.transaction(reason="damage") as tx:
        tx.remove_chunks([tail_of(repo, chain[2])])
    assert ("manifest_incomplete", "error") in codes(repo.check())
    repo.repair(repo.check())
    assert repo.check() == []
    repo.collect()
    repo.verify("main")


def test_the_same_damage_found_twice_is_repaired_once(repo: Repository, chain: list[ManifestId]) -> None:
    flip_byte(repo, tail_of(repo, chain[2]))
    findings = repo.check()
    repo.repair(findings)
    assert repo.repair(findings) == []
