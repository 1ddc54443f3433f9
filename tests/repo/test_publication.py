from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.repo.drafts import draft_of

from forkpoint.errors import Conflict, Corrupt, InvalidInput
from forkpoint.ids import Bytes, ObjectId, ObjectKind
from forkpoint.repo.repository import Repository

TOKENS = list(range(600))
NOWHERE = ObjectId("b3:" + "0" * 64)


def test_what_was_published_is_read_back(repo: Repository) -> None:
    publication = repo.publish(draft_of(TOKENS), branch="main", message="first")
    assert publication.was_new
    assert repo.resolve("main") == publication.manifest_id
    assert repo.tokens(publication.manifest_id) == TOKENS
    assert repo.row(publication.manifest_id).message == "first"
    assert (publication.chunks_written, publication.chunks_shared) == (3, 0)


def test_a_publication_brings_the_manifest_that_it_published(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS), branch="main")
    assert first.manifest == repo.manifest(first.manifest_id)
    taken_in = repo.commit_bundle(b"".join(repo.export_bundle("main")))
    assert taken_in.manifest == first.manifest


def test_publishing_equal_content_again_changes_nothing(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS), branch="main")
    again = repo.publish(draft_of(TOKENS, is_hashed=False), branch="main")
    assert again.manifest_id == first.manifest_id
    assert not again.was_new
    assert (again.bytes_written, again.chunks_shared, again.move_id) == (0, 3, None)


def test_an_unchanged_prefix_is_neither_read_nor_written(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS), branch="main")
    longer = draft_of([*TOKENS, *range(100)], parent=first.manifest_id)

    def refuse() -> Sequence[Bytes]:
        raise AssertionError("the bytes of a stored chunk were asked for")

    group = longer.groups[0]
    kept = tuple(replace(chunk, parts=refuse) for chunk in group.chunks[:2])
    draft = replace(longer, groups=(replace(group, chunks=(*kept, *group.chunks[2:])),))
    second = repo.publish(draft, branch="main")
    assert (second.chunks_written, second.chunks_shared) == (1, 2)
    assert repo.row(second.manifest_id).introduced[0].chunk_id == group.chunks[2].ref.chunk_id  # type: ignore[union-attr]


def test_a_failing_check_advertises_nothing(repo: Repository) -> None:
    def changed() -> None:
        raise Corrupt("the weights changed", code="weights")

    with pytest.raises(Corrupt, match="weights"):
        repo.publish(draft_of(TOKENS, check=changed), branch="main")
    assert repo.catalog.counts().num_manifests == 0
    assert not list(repo.store.scan(ObjectKind.MANIFEST))


def test_a_branch_that_went_elsewhere_is_a_conflict_that_names_the_tip(repo: Repository) -> None:
    first = repo.publish(draft_of([1, 2, 3]), branch="main")
    with pytest.raises(Conflict, match=first.manifest_id[3:15]) as caught:
        repo.publish(draft_of([7, 8]), branch="main")
    assert caught.value.code == "conflict.ref"
    assert caught.value.data["tip"] == first.manifest_id
    assert repo.resolve("main") == first.manifest_id


def test_an_expected_tip_is_compared(repo: Repository) -> None:
    first = repo.publish(draft_of([1, 2, 3]), branch="main")
    with pytest.raises(Conflict):
        repo.publish(draft_of([7, 8]), branch="main", expect=NOWHERE)
    second = repo.publish(draft_of([7, 8]), branch="main", expect=first.manifest_id)
    assert repo.resolve("main") == second.manifest_id
    lost_reply = repo.publish(draft_of([7, 8]), branch="main", expect=first.manifest_id)
    assert lost_reply.move_id is None


def test_a_branch_expected_to_be_absent_must_be(repo: Repository) -> None:
    repo.publish(draft_of([1, 2, 3]), branch="new", expect="absent")
    with pytest.raises(Conflict, match="absent"):
        repo.publish(draft_of([7, 8]), branch="new", expect="absent")


def test_a_parent_that_is_unknown_makes_a_shallow_history(repo: Repository) -> None:
    publication = repo.publish(draft_of(TOKENS, parent=NOWHERE), branch="main")
    assert len(repo.row(publication.manifest_id).introduced) == 3


def test_a_chunk_whose_bytes_changed_after_hashing_is_refused(repo: Repository) -> None:
    draft = draft_of(TOKENS)
    group = draft.groups[0]
    torn = replace(group.chunks[0], parts=lambda: [b"other bytes"])
    with pytest.raises(Corrupt, match="changed after they were hashed"):
        repo.publish(replace(draft, groups=(replace(group, chunks=(torn, *group.chunks[1:])),)), branch="main")
    assert repo.catalog.counts().num_manifests == 0


def test_tokens_that_do_not_reach_the_position_are_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="position"):
        repo.publish(replace(draft_of(TOKENS), tokens=TOKENS[:5]))


def test_publishing_without_a_branch_moves_nothing(repo: Repository) -> None:
    publication = repo.publish(draft_of(TOKENS))
    assert publication.move_id is None
    assert [row.name for row in repo.catalog.refs()] == ["HEAD"]
    assert repo.resolve(publication.manifest_id[3:9]) == publication.manifest_id


def test_a_tokenizer_is_stored_beside_the_chunks(repo: Repository) -> None:
    publication = repo.publish(draft_of(TOKENS, tokenizer=b"{}"))
    tokenizer_id = repo.row(publication.manifest_id).tokenizer_id
    assert tokenizer_id is not None
    assert repo.store.has(ObjectKind.TOKENIZER, tokenizer_id)


def test_publishing_replaces_a_damaged_tokenizer(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS, tokenizer=b"{}"), branch="main").manifest_id
    tokenizer_id = repo.row(first).tokenizer_id
    assert repo.folder is not None
    assert tokenizer_id is not None
    path = repo.folder / "objects/tokenizers" / tokenizer_id[3:5] / f"{tokenizer_id[5:]}.json"
    path.write_bytes(b"[]")
    repo.publish(draft_of([*TOKENS, 1], parent=first, tokenizer=b"{}"), branch="main")
    assert path.read_bytes() == b"{}"
    assert repo.check() == []


def test_a_repository_opened_again_holds_the_same(tmp_path: Path) -> None:
    with Repository.create(tmp_path) as repo:
        publication = repo.publish(draft_of(TOKENS), branch="main")
    with Repository.open(tmp_path) as repo:
        assert repo.resolve("HEAD") == publication.manifest_id
        assert repo.tokens(publication.manifest_id) == TOKENS


def test_a_message_is_cut_once_for_the_catalog_and_the_move(repo: Repository) -> None:
    published = repo.publish(draft_of([1, 2]), branch="main", message="x" * 5000).manifest_id
    assert repo.row(published).message == repo.reflog("main")[0].move.message == "x" * 4096


@pytest.mark.parametrize("message", [None, b"bytes", 7])
def test_a_message_that_is_no_text_is_refused(repo: Repository, message: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        repo.publish(draft_of([1, 2]), branch="main", message=message)
    assert caught.value.code == "invalid_input.message"
    assert repo.branches() == []
