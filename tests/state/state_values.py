"""Hypothesis strategies of state values, sound by construction, and the mutations that tests apply to their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import strategies as st

from forkpoint.errors import Error
from forkpoint.ids import ObjectKind, digest_of
from forkpoint.state.bundle import BundleEntry
from forkpoint.state.canonical import from_float
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import GROUP_KINDS, KINDS, ROLES, ChunkRef, Group, Manifest, Parent
from forkpoint.state.move import Move
from forkpoint.state.slab import DTYPE_BYTES, Slab, SlabSpec

texts = st.text(max_size=12)
integers = st.integers(-(2**63), 2**64 - 1)
counts = st.integers(0, 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | integers | texts | floats.map(from_float),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
records = st.dictionaries(texts, values, max_size=4)
ids = st.binary(max_size=4).map(lambda data: digest_of([data]))
names = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,6}", fullmatch=True)


@st.composite
def domains(draw) -> tuple[tuple[str, int, int], ...]:
    axes = sorted(draw(st.sets(names, max_size=3)))
    return tuple((axis, *sorted((draw(counts), draw(counts)))) for axis in axes)


@st.composite
def slabs(draw, name: str) -> Slab:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    axes = tuple(draw(st.lists(names, min_size=len(shape), max_size=len(shape), unique=True)))
    spec = SlabSpec(name=name, dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))), shape=shape, axes=axes)
    data = draw(st.randoms(use_true_random=False)).randbytes(math.prod(shape) * DTYPE_BYTES[spec.dtype])
    cut = draw(st.integers(0, len(data)))
    return Slab(spec=spec, pieces=[data[:cut], data[cut:]])


@st.composite
def slab_lists(draw) -> list[Slab]:
    return [draw(slabs(name)) for name in draw(st.lists(names, min_size=1, max_size=5, unique=True))]


chunk_refs = st.builds(ChunkRef, chunk_id=ids, num_bytes=counts, domain=domains())
fingerprints = st.builds(Fingerprint, state=records, execution=records)
parents = st.builds(Parent, role=st.sampled_from(ROLES), manifest_id=ids)


@st.composite
def manifests(draw) -> Manifest:
    groups = tuple(
        Group(
            name=name,
            kind=draw(st.sampled_from(GROUP_KINDS)),
            chunks=tuple(draw(st.lists(chunk_refs, max_size=3))),
        )
        for name in sorted(draw(st.sets(names, max_size=3)))
    )
    return Manifest(
        kind=draw(st.sampled_from(KINDS)),
        fingerprint=draw(fingerprints),
        boundary=draw(records),
        groups=groups,
        parents=tuple(draw(st.lists(parents, max_size=3, unique=True))),
        payload=draw(records),
    )


targets = st.none() | ids | st.just("ref:refs/heads/main")
moves = st.builds(
    Move,
    ref=st.sampled_from(["HEAD", "refs/heads/größe"]),
    old=targets,
    new=targets,
    previous=st.none() | ids,
    tx=counts,
    at_us=counts,
    who=texts,
    message=texts,
    is_trusted=st.booleans(),
)


@st.composite
def bundle_entries(draw) -> list[BundleEntry]:
    contents = draw(
        st.lists(st.tuples(st.sampled_from(list(ObjectKind)), st.binary(max_size=130)), max_size=4, unique=True)
    )
    return [BundleEntry(kind=kind, object_id=digest_of([data]), parts=[data]) for kind, data in contents]


@st.composite
def mutations(draw, data: bytes) -> bytes:
    """``data`` with a byte replaced, inserted or removed, or cut short: always different bytes."""
    at = draw(st.integers(0, len(data) - 1))
    kind = draw(st.sampled_from(["replace", "insert", "remove", "cut", "extend"]))
    if kind == "replace":
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    if kind == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=2)) + data[at:]
    if kind == "remove":
        return data[:at] + data[at + 1 :]
    return data[:at] if kind == "cut" else data + draw(st.binary(min_size=1, max_size=64))


def joined(parts) -> bytes:
    return b"".join(bytes(part) for part in parts)


def assert_one_form(read_and_write: Callable[[bytes], bytes], data: bytes) -> None:
    """Hostile ``data`` is refused with a typed error, or it is itself the canonical form of what it means."""
    try:
        written = read_and_write(data)
    except Error:
        return
    assert written == data
