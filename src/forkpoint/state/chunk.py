"""The chunk container: a canonical ``.safetensors`` file that holds one or more slabs (FORMAT.md, "Chunks").

Equal slabs have equal bytes, any safetensors reader opens the file, ``b3sum`` prints its id, and every slab starts at a
multiple of 64 bytes so that a mapped chunk is usable in place. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from forkpoint.errors import Corrupt, Error, Incompatible, InvalidInput
from forkpoint.ids import Bytes
from forkpoint.state.domain import Range, check_domain, domain_text, parse_domain
from forkpoint.state.slab import Slab, SlabSpec

ALIGNMENT: Final = 64
CHUNK_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_CHUNK_BYTES: Final = 1 << 32
_PAD: Final = "~pad"
_METADATA: Final = "__metadata__"
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A parsed chunk. ``domain`` gives, for each named axis, the half-open range of the whole array that it covers.

    ``slabs`` maps a name to its spec and its bytes: read-only views into the bytes that were parsed.
    """

    domain: tuple[Range, ...]
    specs: Mapping[str, SlabSpec]
    slabs: Mapping[str, memoryview]


def encode_chunk(slabs: Sequence[Slab], domain: Sequence[Range]) -> list[Bytes]:
    """The canonical bytes of a chunk, as parts to be written end to end; the slabs' own pieces are passed through uncopied.

    Args:
        slabs: in any order; names must differ. They are written in order of name.
        domain: (axis, start, stop) ranges that this chunk covers, e.g. ``("token", 256, 512)``.

    Raises:
        InvalidInput: ``invalid_input.chunk`` for no slabs, a repeated name, a header over 1 MiB or more than 4 GiB in all;
            ``invalid_input.domain`` for a bad range.
    """
    ordered = sorted(slabs, key=lambda slab: slab.spec.name)
    _check_parts(ordered, domain)
    entries: list[_Entry] = []
    parts: list[Bytes] = []
    offset = 0
    for index, slab in enumerate(ordered):
        padding = -offset % ALIGNMENT
        if padding:
            entries.append(_Entry(f"{_PAD}{index:04d}", "U8", (padding,), offset, offset + padding))
            parts.append(bytes(padding))
            offset += padding
        entries.append(_Entry(slab.spec.name, slab.spec.dtype, slab.spec.shape, offset, offset + slab.spec.num_bytes))
        parts.extend(slab.pieces)
        offset += slab.spec.num_bytes
    header = _header_bytes(_metadata([slab.spec for slab in ordered], domain), entries)
    if len(header) + offset > MAX_CHUNK_BYTES:
        raise InvalidInput(
            f"a chunk of {offset} bytes is over the limit of {MAX_CHUNK_BYTES}", code="chunk", have=offset
        )
    return [header, *parts]


def parse_chunk(data: Bytes) -> Chunk:
    """Read a chunk; its slabs are views into ``data``. Costs the header only: slab bytes are neither read nor copied.

    Raises:
        Corrupt: ``corrupt.chunk`` for anything that is not a canonical chunk: another layout of the same slabs included.
        Incompatible: ``incompatible.chunk_version`` for a version newer than this code knows.
    """
    view = memoryview(data).toreadonly().cast("B")
    start, header, metadata = _read_header(view)
    _check_version(metadata)
    try:
        return _parse(view, start, _entries(header), metadata)
    except InvalidInput as error:
        raise _corrupt(error.message) from error


def _parse(view: memoryview, start: int, entries: Sequence[_Entry], metadata: Mapping[str, str]) -> Chunk:
    """Rebuild the canonical header from what was read; any difference in order, offsets, padding or spelling shows in it."""
    domain = parse_domain(metadata.get("domain", ""))
    slabs: dict[str, Slab] = {}
    for name, dtype, shape, begin, end in entries:
        if not name.startswith(_PAD):
            axes = tuple(filter(None, metadata.get(f"axes.{name}", "").split(",")))
            spec = SlabSpec(name=name, dtype=dtype, shape=shape, axes=axes)
            slabs[name] = Slab(spec=spec, pieces=[view[start + begin : start + end]])
    canonical = encode_chunk(list(slabs.values()), domain)
    total = sum(memoryview(part).nbytes for part in canonical)
    if total != view.nbytes or canonical[0] != bytes(view[:start]):
        raise _corrupt("its header is not in canonical form, or its length differs")
    if any(any(view[start + begin : start + end]) for name, _, _, begin, end in entries if name.startswith(_PAD)):
        raise _corrupt("its padding is not zero")
    return Chunk(
        domain=domain,
        specs={name: slab.spec for name, slab in slabs.items()},
        slabs={name: memoryview(slab.pieces[0]) for name, slab in slabs.items()},
    )


def _check_parts(ordered: Sequence[Slab], domain: Sequence[Range]) -> None:
    names = [slab.spec.name for slab in ordered]
    if not names or len(set(names)) != len(names):
        raise InvalidInput(f"a chunk needs slabs with different names, not {names}", code="chunk")
    check_domain(domain)


def _metadata(specs: Sequence[SlabSpec], domain: Sequence[Range]) -> dict[str, str]:
    metadata = {f"axes.{spec.name}": ",".join(spec.axes) for spec in specs}
    metadata["domain"] = domain_text(domain)
    metadata["forkpoint.chunk"] = str(CHUNK_VERSION)
    return metadata


def _check_version(metadata: Mapping[str, str]) -> None:
    version = metadata.get("forkpoint.chunk", "")
    if not _VERSION.fullmatch(version):
        raise _corrupt("it carries no forkpoint.chunk version")
    if int(version) > CHUNK_VERSION:
        raise Incompatible(
            f"chunk format version {version} is newer than {CHUNK_VERSION}, the newest this program reads; update forkpoint",
            code="chunk_version", field="forkpoint.chunk", have=int(version), want=CHUNK_VERSION,
        )  # fmt: skip


def _header_bytes(metadata: Mapping[str, str], entries: Sequence[_Entry]) -> bytes:
    header: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    for name, dtype, shape, begin, end in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInput(f"a chunk header of {len(text)} bytes is over the limit of {MAX_HEADER_BYTES}", code="chunk")
    return struct.pack("<Q", len(text)) + text


def _read_header(view: memoryview) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Where the data begins, the header without its metadata, and the metadata. Nothing in them has been checked."""
    if view.nbytes < 8:
        raise _corrupt(f"{view.nbytes} bytes are too few for a header")
    (length,) = struct.unpack("<Q", view[:8])
    if length > MAX_HEADER_BYTES or 8 + length > view.nbytes:
        raise _corrupt(f"the header claims {length} bytes")
    try:
        header = json.loads(bytes(view[8 : 8 + length]).decode("ascii"))
        metadata = {str(key): str(text) for key, text in header.pop(_METADATA).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(f"the header cannot be read ({error})") from error
    return 8 + length, header, metadata


def _entries(header: Mapping[str, Any]) -> list[_Entry]:
    try:
        entries = [
            _Entry(name, str(item["dtype"]), tuple(map(int, item["shape"])), *map(int, item["data_offsets"]))
            for name, item in header.items()
        ]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise _corrupt(f"a slab of the header cannot be read ({error})") from error
    if any(begin < 0 or end < begin for _, _, _, begin, end in entries):
        raise _corrupt("a slab has offsets that no data can have")
    return entries


def _corrupt(why: str) -> Error:
    return Corrupt(f"not a canonical chunk: {why}", code="chunk")
