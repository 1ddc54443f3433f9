from __future__ import annotations

from dataclasses import replace

import pytest
from tests.repo.drafts import draft_of, fingerprint_of
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit

from forkpoint.errors import Corrupt, NotFound
from forkpoint.ids import ObjectId, ObjectKind, digest_of
from forkpoint.repo.diff import split_text
from forkpoint.repo.repository import Repository
from forkpoint.state.chunk import encode_chunk
from forkpoint.state.draft import DraftChunk, DraftGroup
from forkpoint.state.manifest import ChunkRef
from forkpoint.state.prefix import token_bytes
from forkpoint.state.slab import Slab, SlabSpec

TOKENS = list(range(600))


def byte_tokenizer() -> bytes:
    """A real tokenizer of bytes: token i is the i-th character of the byte-level alphabet."""
    alphabet = sorted(ByteLevelSplit.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevelSplit(add_prefix_space=False), ByteLevel()
    return tokenizer.to_str().encode()


def tokens_of(text: str) -> list[int]:
    return list(Tokenizer.from_buffer(byte_tokenizer()).encode(text).ids)


def token_chunk(ids: list[int], start: int, claimed: int) -> DraftChunk:
    slab = Slab(
        spec=SlabSpec(name="tokens", dtype="U32", shape=(len(ids),), axes=("token",)), pieces=[token_bytes(ids)]
    )
    domain = (("token", start, start + claimed),)
    parts = encode_chunk([slab], domain)
    size = sum(memoryview(part).nbytes for part in parts)
    return DraftChunk(
        domain=domain, ref=ChunkRef(chunk_id=digest_of(parts), num_bytes=size, domain=domain), parts=lambda: parts
    )


@pytest.mark.parametrize(
    "chunks",
    [
        [token_chunk([1, 2], 0, 2), token_chunk([3], 3, 1)],  # a gap
        [token_chunk([1, 2], 0, 2), token_chunk([2, 3], 1, 2)],  # an overlap
        [token_chunk([1, 2], 0, 2)],  # too short
        [token_chunk([1, 2, 3, 4], 0, 4)],  # too long
        [token_chunk([1, 2], 0, 3)],  # ids that do not fill the range
        [],
    ],
)
def test_a_token_history_with_a_hole_is_corrupt(repo: Repository, chunks: list[DraftChunk]) -> None:
    draft = draft_of([1, 2, 3, 4])
    group = DraftGroup(name="attention", kind="tokens", chunks=tuple(chunks))
    published = repo.publish(replace(draft, groups=(group,))).manifest_id
    with pytest.raises(Corrupt) as caught:
        repo.tokens(published)
    assert caught.value.code == "corrupt.tokens"
    with pytest.raises(Corrupt):
        repo.verify(published)


def test_tokens_come_back_with_and_without_a_pending_one(repo: Repository) -> None:
    assert repo.tokens(repo.publish(draft_of(TOKENS)).manifest_id) == TOKENS
    draft = replace(draft_of(TOKENS), boundary={"pending": None, "position": 599})
    assert repo.tokens(repo.publish(draft).manifest_id) == TOKENS[:599]
    assert repo.tokens(repo.publish(draft_of([7])).manifest_id) == [7]


def test_text_is_read_back_from_the_store_alone(repo: Repository) -> None:
    text = "Grüße, 世界! 🦊"
    published = repo.publish(draft_of(tokens_of(text), tokenizer=byte_tokenizer())).manifest_id
    assert repo.text(published) == text
    assert repo.text(repo.publish(draft_of([1, 2])).manifest_id) is None


@pytest.mark.parametrize("token", [-1, 2**32, 2**63 - 1, 2**64])
def test_what_is_no_token_id_has_no_text(repo: Repository, token: int) -> None:
    published = repo.publish(draft_of(tokens_of("hi"), tokenizer=byte_tokenizer()), branch="main").manifest_id
    decode = repo.tokenizer(published)
    assert decode is not None
    with pytest.raises(Corrupt) as caught:
        decode([token])
    assert caught.value.code == "corrupt.tokens"


def test_a_tokenizer_that_is_none_is_corrupt(repo: Repository) -> None:
    published = repo.publish(draft_of([1, 2], tokenizer=b"not a tokenizer")).manifest_id
    with pytest.raises(Corrupt) as caught:
        repo.text(published)
    assert caught.value.code == "corrupt.tokenizer"


def test_the_longest_stored_prefix_is_found(repo: Repository) -> None:
    repo.publish(draft_of(TOKENS, groups=("full", "window")))
    match = repo.find_prefix(fingerprint_of(), [*TOKENS[:550], 9, 9], ["full", "window"])
    assert match is not None
    assert match.num_tokens == 512
    assert [(group.name, [ref.domain for ref in group.chunks]) for group in match.groups] == [
        (name, [(("token", 0, 256),), (("token", 256, 512),)]) for name in ("full", "window")
    ]
    shorter = repo.find_prefix(fingerprint_of(), [*TOKENS[:300], *TOKENS], ["full"])
    assert shorter is not None
    assert shorter.num_tokens == 256


def test_nothing_is_found_under_another_model_machine_namespace_or_prefix(repo: Repository) -> None:
    repo.publish(draft_of(TOKENS))
    for fingerprint in (fingerprint_of("other"), fingerprint_of(machine="gpu")):
        assert repo.find_prefix(fingerprint, TOKENS, ["attention"]) is None
    assert repo.find_prefix(fingerprint_of(), [99, *TOKENS[1:]], ["attention"]) is None
    assert repo.find_prefix(fingerprint_of(), TOKENS, ["attention", "absent"]) is None
    assert repo.find_prefix(fingerprint_of(), TOKENS[:255], ["attention"]) is None
    assert repo.find_prefix(fingerprint_of(), TOKENS, []) is None
    stranger = Repository(store=repo.store, catalog=repo.catalog, namespace="other")
    assert stranger.find_prefix(fingerprint_of(), TOKENS, ["attention"]) is None


def test_an_untrusted_draft_and_what_continues_it_are_not_indexed(repo: Repository) -> None:
    foreign = repo.publish(draft_of(TOKENS, is_trusted=False), branch="main").manifest_id
    child = repo.publish(draft_of([*TOKENS, *TOKENS], parent=foreign), branch="main").manifest_id
    assert repo.find_prefix(fingerprint_of(), TOKENS, ["attention"]) is None
    assert not repo.row(child).is_trusted
    assert [entry.move.is_trusted for entry in repo.reflog("main")] == [False, False]


def test_what_continues_another_fingerprint_is_not_indexed(repo: Repository) -> None:
    first = repo.publish(draft_of(TOKENS, machine="gpu")).manifest_id
    repo.publish(draft_of([*TOKENS, 1], parent=first, machine="cpu"))
    assert repo.find_prefix(fingerprint_of(machine="cpu"), TOKENS, ["attention"]) is None


def test_computing_the_same_here_makes_it_trusted(repo: Repository) -> None:
    published = repo.publish(draft_of(TOKENS, is_trusted=False)).manifest_id
    repo.publish(draft_of(TOKENS))
    assert repo.row(published).is_trusted
    assert repo.find_prefix(fingerprint_of(), TOKENS, ["attention"]) is not None


def test_a_prefix_hit_with_other_token_ids_is_never_served(repo: Repository) -> None:
    wrong = draft_of(TOKENS)
    repo.publish(replace(wrong, tokens=[1, *TOKENS[1:599]]))  # an engine whose claim differs from what its chunks carry
    with pytest.raises(Corrupt) as caught:
        repo.find_prefix(fingerprint_of(), [1, *TOKENS[1:]], ["attention"])
    assert caught.value.code == "corrupt.prefix"


def test_verification_counts_what_it_verified_and_names_what_is_wrong(repo: Repository) -> None:
    published = repo.publish(draft_of(TOKENS), branch="main").manifest_id
    receipt = repo.verify("main")
    assert (receipt.manifest_id, receipt.num_chunks, receipt.num_tokens) == (published, 3, 600)
    assert receipt.num_bytes == repo.row(published).num_bytes
    chunk_id = repo.row(published).introduced[0].chunk_id
    flip_byte(repo, chunk_id)
    with pytest.raises(Corrupt, match=chunk_id[3:15]):
        repo.verify("main")
    repo.store.delete(ObjectKind.CHUNK, chunk_id)
    with pytest.raises(NotFound):
        repo.verify("main")


def test_a_diff_says_where_two_continuations_part(repo: Repository) -> None:
    asked = tokens_of("The fox says: ")
    base = repo.publish(draft_of(asked, tokenizer=byte_tokenizer()), branch="main").manifest_id
    for name, answer in (("one", "ü 🦊"), ("two", "û 🦉")):
        repo.publish(draft_of([*asked, *tokens_of(answer)], parent=base, tokenizer=byte_tokenizer()), branch=name)
    diff = repo.diff("one", "two")
    assert diff.common_ancestor == base
    assert diff.num_common_tokens == len(asked) + 1  # the first byte of both answers is the same
    assert diff.text is not None
    assert (diff.text.context, diff.text.left, diff.text.right) == ("The fox says: ", "ü 🦊", "û 🦉")
    assert diff.fingerprint == diff.sampling == ()
    assert (diff.chunks_shared, diff.left_chunks, diff.right_chunks) == (0, 1, 1)


def test_a_diff_counts_shared_bytes_and_names_fields(repo: Repository) -> None:
    one = replace(draft_of(TOKENS), boundary={"pending": 1, "position": 599, "sampling": {"seed": 1}})
    other = replace(
        draft_of([*TOKENS, 4], machine="gpu"), boundary={"pending": 4, "position": 600, "sampling": {"seed": 2}}
    )
    ids = [repo.publish(draft).manifest_id for draft in (one, other)]
    diff = repo.diff(*ids)
    assert (diff.chunks_shared, diff.left_chunks, diff.right_chunks) == (2, 1, 1)
    assert diff.bytes_shared + diff.left_bytes == repo.row(ids[0]).num_bytes
    assert [each.field for each in diff.fingerprint] == ["execution.machine"]
    assert [str(each) for each in diff.sampling] == ["seed: have 1, want 2"]
    assert (diff.text, diff.common_ancestor) == (None, None)
    assert repo.diff(ids[0], ids[0]).left_tokens == ()


def test_a_split_shows_a_little_of_what_came_before() -> None:
    split = split_text("x" * 200 + "left", "x" * 200 + "right")
    assert (split.context, split.left, split.right) == ("x" * 80, "left", "right")


def test_show_and_status_say_what_there_is(repo: Repository) -> None:
    assert repo.status().row is None
    published = repo.publish(draft_of(TOKENS, payload={"message": "mine"}), branch="main", message="theirs").manifest_id
    shown = repo.show("main")
    assert (shown.manifest_id, shown.refs, shown.text) == (published, ("HEAD", "refs/heads/main"), None)
    assert shown.tokens == tuple(TOKENS)
    assert shown.row.message == "mine"
    status = repo.status()
    assert (status.head.branch, status.num_branches, status.num_tags) == ("main", 1, 0)
    assert status.row == shown.row


def flip_byte(repo: Repository, chunk_id: ObjectId) -> None:
    assert repo.folder is not None
    path = repo.folder / "objects/chunks" / chunk_id[3:5] / f"{chunk_id[5:]}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
