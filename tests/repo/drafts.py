"""Drafts without a model: the bytes of a chunk are a function of the model's name and of the tokens up to its end.

So they behave as real state does under an exact engine: equal tokens give equal chunks, and a changed prefix changes all after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from forkpoint.ids import ManifestId, ObjectId, ObjectKind, digest_of
from forkpoint.state.canonical import Record
from forkpoint.state.chunk import encode_chunk
from forkpoint.state.draft import Asset, Draft, DraftChunk, DraftGroup
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import ChunkRef, Parent
from forkpoint.state.prefix import CHUNK_TOKENS, token_bytes
from forkpoint.state.slab import Slab, SlabSpec

STATE_BYTES = 64


def fingerprint_of(model: str = "tiny", *, machine: str = "cpu", tokenizer: ObjectId | None = None) -> Fingerprint:
    state: dict[str, str] = {"model": model} if tokenizer is None else {"model": model, "tokenizer": tokenizer}
    return Fingerprint(state=state, execution={"machine": machine})


def draft_of(
    tokens: Sequence[int],
    *,
    parent: ManifestId | None = None,
    parents: Sequence[Parent] = (),
    model: str = "tiny",
    machine: str = "cpu",
    groups: Sequence[str] = ("attention",),
    payload: Record | None = None,
    tokenizer: bytes | None = None,
    is_trusted: bool = True,
    is_hashed: bool = True,
    state_bytes: int = STATE_BYTES,
    check: Callable[[], None] = lambda: None,
) -> Draft:
    """A draft whose token history is ``tokens``: all but the last are processed, the last is pending.

    ``is_hashed`` says whether the chunks carry their ids already, as those of an engine that captured them before do.
    """
    processed = list(tokens[:-1])
    tokenizer_id = None if tokenizer is None else digest_of([tokenizer])
    continued = () if parent is None else (Parent(role="continues", manifest_id=parent),)
    return Draft(
        kind="llm",
        fingerprint=fingerprint_of(model, machine=machine, tokenizer=tokenizer_id),
        boundary={"pending": tokens[-1] if tokens else None, "position": len(processed), "sampling": {}},
        groups=tuple(_group(name, model, processed, is_hashed, state_bytes) for name in groups),
        parents=(*continued, *parents),
        payload=payload or {},
        assets=() if tokenizer is None else (_asset(tokenizer),),
        tokens=processed,
        is_trusted=is_trusted,
        check=check,
    )


def chunk_parts(
    name: str, model: str, tokens: Sequence[int], start: int, state_bytes: int = STATE_BYTES
) -> list[bytes]:
    """The bytes of the chunk that covers tokens [start, len(tokens)), in one part."""
    seed = f"{model}/{name}/".encode() + token_bytes(tokens)
    state = blake3(seed).digest(length=state_bytes)
    count = len(tokens) - start
    slabs = [
        Slab(spec=SlabSpec(name="state", dtype="U8", shape=(state_bytes,), axes=("byte",)), pieces=[state]),
        Slab(
            spec=SlabSpec(name="tokens", dtype="U32", shape=(count,), axes=("token",)),
            pieces=[token_bytes(tokens[start:])],
        ),
    ]
    return [b"".join(encode_chunk(slabs, [("token", start, len(tokens))]))]


def _group(name: str, model: str, tokens: Sequence[int], is_hashed: bool, state_bytes: int) -> DraftGroup:
    starts = range(0, len(tokens), CHUNK_TOKENS)
    chunks = tuple(
        _chunk(
            chunk_parts(name, model, tokens[: start + CHUNK_TOKENS], start, state_bytes), start, len(tokens), is_hashed
        )
        for start in starts
    )
    return DraftGroup(name=name, kind="tokens", chunks=chunks)


def _chunk(parts: list[bytes], start: int, num_tokens: int, is_hashed: bool) -> DraftChunk:
    domain = (("token", start, min(start + CHUNK_TOKENS, num_tokens)),)
    num_bytes = sum(map(len, parts))
    ref = ChunkRef(chunk_id=digest_of(parts), num_bytes=num_bytes, domain=domain) if is_hashed else None
    return DraftChunk(domain=domain, ref=ref, parts=lambda: parts)


def _asset(tokenizer: bytes) -> Asset:
    return Asset(kind=ObjectKind.TOKENIZER, object_id=digest_of([tokenizer]), parts=lambda: [tokenizer])
