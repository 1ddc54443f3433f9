"""From resident state to a draft: chunks of 256 tokens a state group, the tail chunk last. Nothing is copied; bytes are read when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forkpoint.ids import Bytes, ObjectKind
from forkpoint.llm.boundary import Boundary
from forkpoint.llm.engines.base import Runtime
from forkpoint.llm.resident.base import DTYPE_NAMES, GroupSpec, State
from forkpoint.state.canonical import Record
from forkpoint.state.chunk import encode_chunk
from forkpoint.state.draft import Asset, Draft, DraftChunk, DraftGroup
from forkpoint.state.manifest import Parent
from forkpoint.state.prefix import CHUNK_TOKENS, token_bytes
from forkpoint.state.slab import Slab, SlabSpec


def capture(
    runtime: Runtime,
    state: State,
    tokens: Sequence[int],
    boundary: Boundary,
    *,
    parents: tuple[Parent, ...],
    payload: Record,
    is_trusted: bool,
) -> Draft:
    """A draft of the state of ``tokens`` (the processed ones, ``len(tokens) == state.length``).

    Publishing it digests the model's parameters again: a state that was computed under weights that have since changed is refused.
    """
    assert len(tokens) == state.length == boundary.position
    groups = tuple(
        DraftGroup(name=spec.name, kind=spec.kind, chunks=tuple(_chunks(state, index, spec, tokens)))
        for index, spec in enumerate(runtime.groups)
    )
    asset = Asset(
        kind=ObjectKind.TOKENIZER, object_id=runtime.codec.tokenizer_id, parts=lambda: [runtime.codec.serialised()]
    )
    return Draft(
        kind="llm",
        fingerprint=runtime.fingerprint,
        boundary=boundary.to_record(),
        groups=groups,
        parents=parents,
        payload=payload,
        assets=(asset,),
        tokens=tokens,
        is_trusted=is_trusted,
        check=runtime.verify_weights,
    )


def _chunks(state: State, group: int, spec: GroupSpec, tokens: Sequence[int]) -> list[DraftChunk]:
    chunks = []
    for index, start in enumerate(range(0, len(tokens), CHUNK_TOKENS)):
        stop = min(start + CHUNK_TOKENS, len(tokens))
        is_full = stop - start == CHUNK_TOKENS
        chunks.append(
            DraftChunk(
                domain=(("token", start, stop),),
                ref=state.chunk_ref(group, index) if is_full else None,
                parts=_reader(state, group, spec, tokens, start, stop),
            )
        )
    return chunks


def _reader(
    state: State, group: int, spec: GroupSpec, tokens: Sequence[int], start: int, stop: int
) -> Callable[[], Sequence[Bytes]]:
    def read() -> Sequence[Bytes]:
        keys, values = state.slab_pieces(group, start, stop)
        slabs = [
            Slab(spec=chunk_slab(spec, "k", stop - start), pieces=keys),
            Slab(spec=chunk_slab(spec, "v", stop - start), pieces=values),
            Slab(spec=tokens_slab(stop - start), pieces=[token_bytes(tokens[start:stop])]),
        ]
        return encode_chunk(slabs, [("token", start, stop)])

    return read


def chunk_slab(spec: GroupSpec, name: str, num_tokens: int) -> SlabSpec:
    """The ``k`` or ``v`` slab of a token chunk of a group."""
    dim = spec.key_dim if name == "k" else spec.value_dim
    return SlabSpec(
        name=name,
        dtype=DTYPE_NAMES[spec.dtype],
        shape=(len(spec.layers), num_tokens, spec.num_heads, dim),
        axes=("layer", "token", "head", "dim"),
    )


def tokens_slab(num_tokens: int) -> SlabSpec:
    """The slab in which a token chunk carries its own token ids."""
    return SlabSpec(name="tokens", dtype="U32", shape=(num_tokens,), axes=("token",))
