from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.repo.drafts import draft_of, fingerprint_of

from forkpoint.errors import Conflict, Corrupt, Error, InvalidInput
from forkpoint.ids import ObjectKind
from forkpoint.repo.repository import Repository
from forkpoint.repo.staging import stage
from forkpoint.state.bundle import BundleEntry, encode_bundle, parse_bundle

TOKENS = list(range(600))


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "origin") as repository:
        first = repository.publish(draft_of(TOKENS[:300], tokenizer=b"{}"), branch="main").manifest_id
        repository.publish(draft_of(TOKENS, parent=first, tokenizer=b"{}"), branch="main")
        yield repository


@pytest.fixture
def data(origin: Repository) -> bytes:
    return b"".join(origin.export_bundle("main"))


def test_a_bundle_carries_one_continuation_without_its_ancestors(
    origin: Repository, data: bytes, repo: Repository
) -> None:
    published = repo.commit_bundle(data, branch="theirs")
    assert published.manifest_id == origin.resolve("main") == repo.resolve("theirs")
    assert (published.was_new, published.chunks_written) == (True, 3)
    assert repo.tokens(published.manifest_id) == TOKENS
    assert len(repo.row(published.manifest_id).introduced) == 3
    tokenizer_id = repo.row(published.manifest_id).tokenizer_id
    assert tokenizer_id is not None
    assert repo.store.has(ObjectKind.TOKENIZER, tokenizer_id)
    repo.collect()
    repo.verify("theirs")
    assert repo.check() == []


def test_what_came_in_is_used_by_name_only(data: bytes, repo: Repository) -> None:
    published = repo.commit_bundle(data, branch="theirs").manifest_id
    assert not repo.row(published).is_trusted
    fingerprint = repo.manifest(published).fingerprint
    assert repo.find_prefix(fingerprint, TOKENS, ["attention"]) is None
    repo.branch("mine", "theirs")
    assert not repo.reflog("mine")[0].move.is_trusted
    repo.publish(draft_of(TOKENS, parent=repo.manifest(published).parents[0].manifest_id, tokenizer=b"{}"))
    assert repo.row(published).is_trusted  # computed here after all


def test_committing_a_bundle_again_changes_nothing(data: bytes, repo: Repository) -> None:
    repo.commit_bundle(data, branch="theirs")
    again = repo.commit_bundle(data, branch="theirs")
    assert (again.was_new, again.bytes_written, again.move_id) == (False, 0, None)


def test_a_branch_that_went_elsewhere_is_kept(data: bytes, repo: Repository) -> None:
    mine = repo.publish(draft_of([1, 2]), branch="main").manifest_id
    with pytest.raises(Conflict):
        repo.commit_bundle(data, branch="main")
    assert repo.resolve("main") == mine


@pytest.mark.parametrize("at", [0, 9, 30, 200, 1000, -100])
def test_a_flipped_byte_is_refused_and_nothing_is_advertised(data: bytes, repo: Repository, at: int) -> None:
    torn = bytearray(data)
    torn[at] ^= 1
    with pytest.raises(Error):
        repo.commit_bundle(torn, branch="theirs")
    assert repo.catalog.counts().num_manifests == 0


@pytest.mark.parametrize("length", [0, 10, 100, 2000, -1])
def test_a_truncated_bundle_is_refused(data: bytes, repo: Repository, length: int) -> None:
    with pytest.raises(Corrupt):
        repo.commit_bundle(data[:length], branch="theirs")
    assert repo.catalog.counts().num_manifests == 0


def test_a_chunk_must_be_brought_even_if_it_is_here(origin: Repository, data: bytes) -> None:
    bundle = parse_bundle(data)
    kept = [key for key in bundle.objects if key[0] is not ObjectKind.CHUNK]
    entries = [BundleEntry(kind=kind, object_id=each, parts=[bundle.objects[kind, each]]) for kind, each in kept]
    with pytest.raises(Corrupt, match="lacks chunk"):
        origin.commit_bundle(b"".join(encode_bundle(bundle.heads, entries)), branch="theirs")


@pytest.mark.parametrize("kind", ["llm", "field"])
def test_a_pending_token_that_is_none_is_refused(origin: Repository, repo: Repository, kind: str) -> None:
    draft = draft_of(TOKENS[:3])
    draft = replace(draft, kind=kind, boundary={**draft.boundary, "pending": 2**63 - 1})
    manifest = stage(origin._backing, draft)
    parts = [origin.store.get(ObjectKind.MANIFEST, manifest.manifest_id)]
    entries = [BundleEntry(kind=ObjectKind.MANIFEST, object_id=manifest.manifest_id, parts=parts)]
    for chunk in manifest.manifest.chunks():
        parts = [origin.store.get(ObjectKind.CHUNK, chunk.chunk_id)]
        entries.append(BundleEntry(kind=ObjectKind.CHUNK, object_id=chunk.chunk_id, parts=parts))
    with pytest.raises(Corrupt) as caught:
        repo.commit_bundle(b"".join(encode_bundle([manifest.manifest_id], entries)), branch="theirs")
    assert caught.value.code == "corrupt.tokens"
    assert repo.branches() == []
    with pytest.raises(Corrupt):
        repo.publish(draft, branch="mine")
    assert repo.status().row is None


def test_a_bundle_of_several_heads_is_refused(data: bytes, repo: Repository) -> None:
    bundle = parse_bundle(data)
    entries = [BundleEntry(kind=kind, object_id=each, parts=[view]) for (kind, each), view in bundle.objects.items()]
    with pytest.raises(InvalidInput, match="0 heads"):
        repo.commit_bundle(b"".join(encode_bundle([], entries)))


def test_what_continues_a_foreign_manifest_is_not_indexed(data: bytes, repo: Repository) -> None:
    foreign = repo.commit_bundle(data, branch="theirs").manifest_id
    repo.publish(draft_of([*TOKENS, *TOKENS], parent=foreign, tokenizer=b"{}"), branch="theirs")
    fingerprint = repo.manifest(foreign).fingerprint
    assert fingerprint != fingerprint_of()
    assert repo.find_prefix(fingerprint, TOKENS, ["attention"]) is None
