"""From stored chunks to resident state, as a transaction: everything is checked before a state exists, and each chunk is verified by digest
before its bytes are copied. Two threads, so that one chunk is hashed while another is copied; beyond the state itself a chunk each.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from forkpoint.errors import Corrupt, Error, Incompatible
from forkpoint.llm.capture import chunk_slab, tokens_slab
from forkpoint.llm.engines.base import PrefillProgress, Runtime, no_progress
from forkpoint.llm.resident.base import Fetch, GroupSpec, Restoration, State, beyond_context
from forkpoint.state.chunk import Chunk
from forkpoint.state.fingerprint import check_execution, check_state, differences
from forkpoint.state.manifest import ChunkRef, Group, Manifest

_THREADS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored state, the tokens it covers, and what was read for it."""

    state: State
    tokens: tuple[int, ...]
    num_chunks: int
    num_bytes: int


def check_fits(
    runtime: Runtime, manifest: Manifest, *, allow_execution_difference: bool
) -> tuple[str, tuple[str, ...]]:
    """Check that a manifest fits a runtime, before any bytes are read.

    Returns:
        The claim that holds afterwards and notes for the receipt.

    Raises:
        Incompatible: naming the field that differs and both values.
    """
    if manifest.kind != "llm":
        raise Incompatible(
            f"a manifest of kind {manifest.kind!r} is no language-model continuation",
            code="kind",
            field="kind",
            have="llm",
            want=manifest.kind,
        )
    check_state(runtime.fingerprint, manifest.fingerprint)
    try:
        check_execution(runtime.fingerprint, manifest.fingerprint)
    except Incompatible:
        if not allow_execution_difference:
            raise
        return "bytes", tuple(
            f"restored across an execution difference in {each}"
            for each in differences(runtime.fingerprint.execution, manifest.fingerprint.execution)
        )
    return runtime.exactness.claim, ()


def restore_groups(
    runtime: Runtime,
    groups: Sequence[Group],
    length: int,
    fetch: Fetch,
    progress: PrefillProgress = no_progress,
    *,
    prefilled: int,
    is_lasting: bool = False,
) -> Restored:
    """Read the chunks of ``groups`` that cover tokens ``[0, length)`` into a new state.

    Args:
        prefilled: leading tokens that have the bits of any cold start.
        is_lasting: ``fetch`` can be asked again at any time, so that chunks may be evicted when memory is full.

    Raises:
        CapacityExceeded: ``capacity.context`` for a state longer than this runtime takes.
        Corrupt: ``corrupt.continuation`` when groups or chunks are not those of this model, do not cover the range, or disagree on the
            tokens; or what ``fetch`` raises. No state exists then.
    """
    _check_groups(runtime, groups, length)
    if length > runtime.max_context:  # memory may hold more than the continuations of this runtime may have
        raise beyond_context(length, runtime.max_context)
    restoration = runtime.strategy.restore(length, fetch if is_lasting else None)
    work = [(index, spec, ref) for index, spec in enumerate(runtime.groups) for ref in groups[index].chunks]
    pieces: dict[tuple[int, int], bytes] = {}

    def place(item: tuple[int, GroupSpec, ChunkRef]) -> None:
        index, spec, ref = item
        pieces[index, ref.domain[0][1]] = _place_chunk(restoration, index, spec, ref, fetch(ref))

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for done, _ in enumerate(pool.map(place, work), start=1):
                progress(done, len(work))
        tokens = _agreed_tokens(pieces, len(runtime.groups))
        if tokens and max(tokens) >= runtime.vocabulary:
            raise _corrupt(f"it carries token {max(tokens)}, which this model does not have")
    except BaseException:
        restoration.abort()
        raise
    return Restored(
        state=restoration.finish(prefilled=prefilled),
        tokens=tokens,
        num_chunks=len(work),
        num_bytes=sum(ref.num_bytes for _, _, ref in work),
    )


def _check_groups(runtime: Runtime, groups: Sequence[Group], length: int) -> None:
    have, want = [group.name for group in groups], [spec.name for spec in runtime.groups]
    if have != want or [group.kind for group in groups] != [spec.kind for spec in runtime.groups]:
        raise _corrupt(f"its groups are {have} where this model holds {want}")
    for group in groups:
        stop = 0
        for ref in group.chunks:
            if (
                len(ref.domain) != 1
                or ref.domain[0][0] != "token"
                or ref.domain[0][1] != stop
                or ref.domain[0][2] <= stop
            ):
                raise _corrupt(
                    f"chunk {ref.chunk_id} of group {group.name} covers {ref.domain}, not tokens from {stop} on"
                )
            stop = ref.domain[0][2]
        if stop != length:
            raise _corrupt(f"group {group.name} covers {stop} tokens, not {length}")


def _place_chunk(restoration: Restoration, index: int, spec: GroupSpec, ref: ChunkRef, chunk: Chunk) -> bytes:
    start, stop = ref.domain[0][1:]
    wanted = {
        slab.name: slab
        for slab in (
            chunk_slab(spec, "k", stop - start),
            chunk_slab(spec, "v", stop - start),
            tokens_slab(stop - start),
        )
    }
    if dict(chunk.specs) != wanted or chunk.domain != ref.domain:
        raise _corrupt(f"chunk {ref.chunk_id} does not hold tokens [{start}, {stop}) of group {spec.name}")
    restoration.write_chunk(index, start, chunk, ref)
    return bytes(chunk.slabs["tokens"])


def _agreed_tokens(pieces: dict[tuple[int, int], bytes], num_groups: int) -> tuple[int, ...]:
    texts = [
        b"".join(piece for (index, _), piece in sorted(pieces.items()) if index == group) for group in range(num_groups)
    ]
    if any(text != texts[0] for text in texts):
        raise _corrupt("its groups carry different token ids")
    return struct.unpack(f"<{len(texts[0]) // 4}I", texts[0])


def _corrupt(why: str) -> Error:
    return Corrupt(f"not a sound continuation: {why}", code="continuation")
