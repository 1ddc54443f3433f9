"""Writes the golden vectors of format version 1. Run once; they are then what every later version must still read.

    PYTHONPATH=src python tests/golden/make.py [--overwrite]

Without ``--overwrite`` it refuses to touch a file that exists. Changing a vector of a released version is a break of the format: add
vectors of the new version beside the old ones instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forkpoint.ids import ChunkId, ManifestId, ObjectKind, digest_of
from forkpoint.state.bundle import BundleEntry, encode_bundle
from forkpoint.state.canonical import Value, canonical_bytes, from_float
from forkpoint.state.chunk import encode_chunk
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.manifest import ChunkRef, Group, Manifest, Parent, encode_manifest
from forkpoint.state.move import Move, encode_move
from forkpoint.state.prefix import prefix_keys, root_key, token_bytes
from forkpoint.state.slab import Slab, SlabSpec

HERE = Path(__file__).parent

VALUES: list[Value] = [
    None,
    True,
    0,
    -1,
    2**64 - 1,
    -(2**63),
    "",
    'quote " backslash \\ slash / delete \x7f',
    "".join(map(chr, range(0x20))),
    "é e\u0301 \u2028 \uff5e \U0001f600",
    [],
    {},
    [[], {}, [None, False]],
    {"b": 1, "a": 2, "B": 3, "": 4, "aa": 5, "a\n": 6},
    {"\U0001f600": "after", "\uff5e": "before: code points, not UTF-16 units", "é": 0},
    [from_float(number) for number in (0.0, -0.0, 1.0, 0.1, -2.5, 5e-324, 2.0**-1022, 1.7976931348623157e308)],
]

TOKENS = [*range(256), *(2**32 - 1 - index for index in range(44))]


def main(arguments: list[str]) -> int:
    files = vectors()
    existing = [name for name in files if (HERE / name).exists()]
    if existing and arguments != ["--overwrite"]:
        print(
            f"refused: {existing} exist; golden vectors are not regenerated (pass --overwrite if no release has them)"
        )
        return 1
    for name, data in files.items():
        (HERE / name).write_bytes(data)
    return 0


def vectors() -> dict[str, bytes]:
    """File name to content."""
    chunk = b"".join(bytes(part) for part in encode_chunk(chunk_slabs(), [("layer", 0, 2), ("token", 256, 259)]))
    manifest = encode_manifest(example_manifest(chunk))
    move = encode_move(example_move(digest_of([manifest])))
    bundle = b"".join(bytes(part) for part in encode_bundle([digest_of([manifest])], entries(chunk, manifest, move)))
    files = {"chunk.safetensors": chunk, "manifest.json": manifest, "move.json": move, "bundle.bin": bundle}
    ids = {name: digest_of([data]) for name, data in files.items()}
    files["ids.json"] = _text(ids)
    files["canonical.json"] = _text([_case(value) for value in VALUES])
    files["prefix.json"] = _text(prefix_case())
    return files


def chunk_slabs() -> list[Slab]:
    """Unordered on purpose; with padding, a scalar and an empty slab."""
    return [
        Slab(spec=SlabSpec(name="tokens", dtype="U32", shape=(3,), axes=("token",)), pieces=[token_bytes([7, 0, 2**32 - 1])]),
        Slab(
            spec=SlabSpec(name="k", dtype="F32", shape=(2, 3, 1, 4), axes=("layer", "token", "head", "dim")),
            pieces=[bytes(range(48)), bytes(range(48, 96))],
        ),
        Slab(spec=SlabSpec(name="clock", dtype="I64", shape=(), axes=()), pieces=[(-5).to_bytes(8, "little", signed=True)]),
        Slab(spec=SlabSpec(name="none", dtype="F64", shape=(0, 3), axes=("row", "column")), pieces=[]),
    ]  # fmt: skip


def example_manifest(chunk: bytes) -> Manifest:
    """A continuation of 259 tokens; its first chunk is not part of the vectors."""
    groups = (
        Group(
            name="full",
            kind="tokens",
            chunks=(
                ChunkRef(chunk_id=ChunkId(digest_of([b"first"])), num_bytes=1234, domain=(("layer", 0, 2), ("token", 0, 256))),
                ChunkRef(chunk_id=digest_of([chunk]), num_bytes=len(chunk), domain=(("layer", 0, 2), ("token", 256, 259))),
            ),
        ),
    )  # fmt: skip
    return Manifest(
        kind="llm",
        fingerprint=Fingerprint(
            state={"architecture": "Example", "config": {"rope_theta": from_float(10000.0)}, "tokenizer": digest_of([b"{}"])},
            execution={"engine": "example", "libraries": {"torch": "2.13.0"}},
        ),
        boundary={"offset": 0, "pending": 42, "position": 259, "prompt_length": 250, "sampling": sampling()},
        groups=groups,
        parents=(Parent(role="continues", manifest_id=ManifestId(digest_of([b"parent"]))),),
        payload={"message": "Größe: 2 × 3 → 6 😀"},
    )  # fmt: skip


def sampling() -> dict[str, Value]:
    """A sampling record."""
    return {
        "frequency_penalty": "0x0.0p+0", "logit_bias": [[3, "-0x1.9000000000000p+6"]], "min_p": "0x1.999999999999ap-5",
        "presence_penalty": "0x0.0p+0", "repetition_penalty": "0x1.0000000000000p+0", "seed": 2**64 - 1, "stop": ["\n\n"],
        "stream": 0, "temperature": "0x1.6666666666666p-1", "top_k": 40, "top_p": "0x1.e666666666666p-1",
    }  # fmt: skip


def example_move(target: ManifestId) -> Move:
    """The second move of a branch."""
    return Move(
        ref="refs/heads/main", old=digest_of([b"parent"]), new=target, previous=digest_of([b"previous move"]), tx=17,
        at_us=1_700_000_000_123_456, who="ada@example", message="Answer \"six\"", is_trusted=True,
    )  # fmt: skip


def entries(chunk: bytes, manifest: bytes, move: bytes) -> list[BundleEntry]:
    """One object of each kind."""
    objects = [
        (ObjectKind.TOKENIZER, b"{}"),
        (ObjectKind.CHUNK, chunk),
        (ObjectKind.MANIFEST, manifest),
        (ObjectKind.MOVE, move),
    ]
    return [BundleEntry(kind=kind, object_id=digest_of([data]), parts=[data]) for kind, data in objects]


def prefix_case() -> dict[str, object]:
    """Keys of 300 tokens: the empty prefix and one full chunk."""
    state_id = digest_of([b"state"])
    keys = [root_key(state_id, "größe"), *prefix_keys(state_id, "größe", TOKENS)]
    return {"state_id": state_id, "namespace": "größe", "tokens": TOKENS, "keys": keys}


def _case(value: Value) -> dict[str, object]:
    data = canonical_bytes(value)
    return {"value": value, "bytes": data.hex(), "id": digest_of([data])}


def _text(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
