"""A second implementation, written from FORMAT.md alone: the standard library and blake3, nothing of Forkpoint.

It exists to prove that the page is enough. Small rather than fast; it refuses with ``Refused`` whatever the page refuses.
"""

from __future__ import annotations

import math
import re
import struct

from blake3 import blake3

DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,127}")
GROUP = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
ID = re.compile(r"b3:[0-9a-f]{64}")
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
COUNTS = range(2**63)


class Refused(Exception):
    """The bytes or the value are outside the format."""


def need(condition, why):
    if not condition:
        raise Refused(why)


def object_id(data):
    return "b3:" + blake3(data).hexdigest()


# Canonical JSON: a writer, and a reader by recursive descent that accepts the one form only.


def write(value, depth=0):
    if value is None or value is True or value is False:
        return {None: b"null", True: b"true", False: b"false"}[value]
    if isinstance(value, str):
        return write_text(value)
    if isinstance(value, int):
        need(-(2**63) <= value < 2**64, "an integer of more than 64 bits")
        return b"%d" % value
    need(isinstance(value, list | dict) and depth < 32, "no canonical form")
    if isinstance(value, list):
        return b"[" + b",".join(write(item, depth + 1) for item in value) + b"]"
    need(all(isinstance(key, str) for key in value), "a key that is no string")
    pairs = sorted(value.items(), key=lambda pair: utf8(pair[0]))  # the order of UTF-8 bytes is that of code points
    return b"{" + b",".join(write_text(key) + b":" + write(item, depth + 1) for key, item in pairs) + b"}"


def write_text(text):
    escaped = (ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)
    return b'"' + utf8("".join(escaped)) + b'"'


def utf8(text):
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("a lone surrogate") from None


TOKEN = re.compile(
    r'(?P<word>null|true|false)|(?P<int>0|-?[1-9][0-9]{0,19})|"(?P<text>(?:[^"\\\x00-\x1f]|\\(?:["\\bfnrt]|u00[01][0-9a-f]))*)"'
    r"|(?P<mark>[\[\]{},:])"
)
UNESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


def read(data):
    try:
        text = bytes(data).decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("not UTF-8") from None
    value, end = read_value(text, 0, 0)
    need(end == len(text), "something follows the value")
    return value


def read_value(text, at, depth):
    found = TOKEN.match(text, at)
    need(found, f"no value at {at}")
    kind, written = found.lastgroup, found[found.lastgroup]
    if kind == "word":
        return {"null": None, "true": True, "false": False}[written], found.end()
    if kind == "int":
        need(-(2**63) <= int(written) < 2**64, "an integer of more than 64 bits")
        return int(written), found.end()
    if kind == "text":
        return read_text(written), found.end()
    need(written in "[{" and depth < 32, "no value, or too deep")
    return read_items(text, found.end(), depth + 1, "]" if written == "[" else "}")


def read_items(text, at, depth, close):
    items, keys = [], []
    while text[at : at + 1] != close:
        if items:
            need(text[at : at + 1] == ",", "no comma")
            at += 1
        if close == "}":
            key, at = read_value(text, at, depth)
            need(isinstance(key, str) and text[at : at + 1] == ":", "no key")
            need(not keys or utf8(keys[-1]) < utf8(key), "keys out of order, or one twice")
            keys.append(key)
            at += 1
        item, at = read_value(text, at, depth)
        items.append(item)
    return (dict(zip(keys, items, strict=True)) if close == "}" else items), at + 1


def read_text(written):
    def one(found):
        code = found[1]
        return UNESCAPED[code] if code in UNESCAPED else chr(int(code[1:], 16))

    text = re.sub(r"\\(u....|.)", one, written)
    need(write_text(text) == utf8(f'"{written}"'), "another escape than the one allowed")
    return text


def float_text(number):
    sign, magnitude = ("-" if math.copysign(1, number) < 0 else ""), abs(number)
    need(math.isfinite(magnitude), "not finite")
    if magnitude == 0:
        return sign + "0x0.0p+0"
    (bits,) = struct.unpack("<Q", struct.pack("<d", magnitude))
    exponent, fraction = bits >> 52, bits & (2**52 - 1)
    if exponent == 0:
        return f"{sign}0x0.{fraction:013x}p-1022"
    return f"{sign}0x1.{fraction:013x}p{exponent - 1023:+d}"


# Chunks.


def write_chunk(slabs, domain):
    """``slabs``: {name: (dtype, shape, axes, bytes)}; ``domain``: [(axis, start, stop), ...]."""
    check_domain(domain)
    need(slabs, "no slabs")
    metadata = {f"axes.{name}": ",".join(axes) for name, (_, _, axes, _) in slabs.items()}
    metadata["domain"] = ",".join(f"{axis}:{start}:{stop}" for axis, start, stop in domain)
    metadata["forkpoint.chunk"] = "1"
    entries, data = [], b""
    for index, name in enumerate(sorted(slabs)):
        dtype, shape, axes, raw = slabs[name]
        check_slab(name, dtype, shape, axes, len(raw))
        if len(data) % 64:
            padding = 64 - len(data) % 64
            entries.append((f"~pad{index:04d}", "U8", [padding], len(data), len(data) + padding))
            data += bytes(padding)
        entries.append((name, dtype, shape, len(data), len(data) + len(raw)))
        data += raw
    texts = ['"__metadata__":{' + ",".join(f'"{key}":"{metadata[key]}"' for key in sorted(metadata)) + "}"]
    for name, dtype, shape, begin, end in entries:
        sizes = ",".join(map(str, shape))
        texts.append(f'"{name}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
    header = ("{" + ",".join(texts) + "}").encode("ascii")
    header += b" " * (-(8 + len(header)) % 64)
    need(len(header) <= 2**20 and 8 + len(header) + len(data) <= 2**32, "too large")
    return struct.pack("<Q", len(header)) + header + data


def read_chunk(data):
    """(slabs, domain), as write_chunk takes them. The header is taken apart by pattern; writing again shows the rest."""
    need(len(data) >= 8, "no header")
    (length,) = struct.unpack("<Q", data[:8])
    need(length <= 2**20 and 8 + length <= len(data), "no header")
    try:
        header = data[8 : 8 + length].decode("ascii")
    except UnicodeDecodeError:
        raise Refused("not ASCII") from None
    found = re.match(r'\{"__metadata__":\{([^{}]*)\}', header)
    need(found, "no metadata")
    metadata = dict(re.findall(r'"([^"]*)":"([^"]*)"', found[1]))
    need(re.fullmatch(r"[1-9][0-9]*", metadata.get("forkpoint.chunk", "")), "no version")
    need(metadata["forkpoint.chunk"] == "1", "newer")
    entry = r',"([^"]*)":\{"dtype":"([^"]*)","shape":\[([0-9,]*)\],"data_offsets":\[([0-9]{1,19}),([0-9]{1,19})\]\}'
    slabs = {}
    for name, dtype, sizes, begin, end in re.findall(entry, header[found.end() :]):
        if not name.startswith("~pad"):
            shape = [int(size) for size in sizes.split(",") if 0 < len(size) < 20]
            axes = [axis for axis in metadata.get(f"axes.{name}", "").split(",") if axis]
            slabs[name] = (dtype, shape, axes, data[8 + length + int(begin) : 8 + length + int(end)])
    ranges = [item.split(":") for item in metadata.get("domain", "").split(",") if item]
    need(all(len(item) == 3 and item[1].isdigit() and item[2].isdigit() for item in ranges), "no domain")
    domain = [(axis, int(start), int(stop)) for axis, start, stop in ranges]
    need(write_chunk(slabs, domain) == data, "not the canonical chunk")
    return slabs, domain


def check_domain(domain):
    axes = [axis for axis, _, _ in domain]
    need(axes == sorted(set(axes)) and len(axes) <= 8 and all(map(NAME.fullmatch, axes)), "axes")
    need(all(a in COUNTS and b in COUNTS and a <= b for _, a, b in domain), "ranges")


def check_slab(name, dtype, shape, axes, num_bytes):
    need(NAME.fullmatch(name) and dtype in DTYPES and len(shape) == len(axes) <= 8, "slab")
    need(all(map(NAME.fullmatch, axes)) and len(set(axes)) == len(axes), "axes")
    need(all(size in COUNTS for size in shape) and math.prod(filter(None, shape)) <= 2**48, "shape")
    need(math.prod(shape) * DTYPES[dtype] == num_bytes, "bytes")


# Records: checked, and returned as plain maps.


def fields(value, *names):
    need(isinstance(value, dict) and set(value) == set(names), f"fields other than {names}")
    return value


def count(value):
    need(type(value) is int and value in COUNTS, "no count")
    return value


def text(value, pattern=None):
    need(isinstance(value, str) and (pattern is None or pattern.fullmatch(value)), "no such text")
    return value


def items(value):
    need(isinstance(value, list), "no list")
    return value


def read_versioned(data, name, limit):
    need(len(data) <= limit, "too large")
    record = read(data)
    need(isinstance(record, dict) and record.get("format") == f"forkpoint.{name}", "another format")
    need(count(record.get("version")) == 1, "another version")
    return record


def read_manifest(data):
    record = read_versioned(data, "manifest", 2**26)
    fields(record, "boundary", "fingerprint", "format", "groups", "kind", "parents", "payload", "version")
    need(record["kind"] in ("llm", "field"), "kind")
    fields(record["fingerprint"], "execution", "state")
    maps = [record["boundary"], record["payload"], *record["fingerprint"].values()]
    need(all(isinstance(item, dict) for item in maps) and len(write(record["payload"])) <= 2**20, "maps")
    for group in items(record["groups"]):
        text(fields(group, "chunks", "kind", "name")["name"], GROUP)
        need(group["kind"] in ("tokens", "window", "boundary", "field"), "group kind")
        for chunk in items(group["chunks"]):
            text(fields(chunk, "bytes", "domain", "id")["id"], ID)
            count(chunk["bytes"])
            need(all(len(items(item)) == 3 for item in items(chunk["domain"])), "domain")
            check_domain([(text(axis), count(start), count(stop)) for axis, start, stop in chunk["domain"]])
    names = [group["name"] for group in record["groups"]]
    need(names == sorted(set(names)), "group names")
    for parent in items(record["parents"]):
        text(fields(parent, "id", "role")["id"], ID)
        need(parent["role"] in ("continues", "perturbs", "assimilates", "adopts"), "role")
    pairs = {(parent["role"], parent["id"]) for parent in record["parents"]}
    need(len(pairs) == len(record["parents"]), "a parent twice")
    return record


def read_move(data):
    record = read_versioned(data, "move", 2**20)
    fields(
        record, "at_us", "format", "is_trusted", "message", "new", "old", "previous", "ref", "tx", "version", "who"
    )  # fmt: skip
    need(text(record["ref"]) and type(record["is_trusted"]) is bool, "ref, is_trusted")
    for name in ("old", "new"):
        target = record[name]
        symbolic = isinstance(target, str) and target.startswith("ref:") and target != "ref:"
        need(target is None or symbolic or text(target, ID), name)
    need(record["previous"] is None or text(record["previous"], ID), "previous")
    for name in ("tx", "at_us"):
        count(record[name])
    for name in ("who", "message"):
        text(record[name])
    return record


def rebuilt_reflog(moves, ref):
    """``moves``: {id: record}. Ids of the moves of ``ref`` that happened, in order."""
    own = {key: move for key, move in moves.items() if move["ref"] == ref}

    def when(key):
        return own[key]["tx"], own[key]["at_us"], key

    def chain(previous):
        taken = []
        while found := [key for key, move in own.items() if move["previous"] == previous]:
            previous = max(found, key=lambda key: (any(move["previous"] == key for move in own.values()), when(key)))
            taken.append(previous)
        return taken

    chains = [chain(start) for start in {move["previous"] for move in own.values()} - set(own)]
    return [key for taken in sorted(chains, key=lambda taken: when(taken[-1])) for key in taken]


# Prefix keys and bundles.


def field(data):
    return struct.pack("<Q", len(data)) + data


def prefix_keys(state_id, namespace, tokens):
    """key_0 and the key of every full chunk."""
    root = field(b"forkpoint.prefix.root.1") + field(bytes.fromhex(state_id[3:])) + field(utf8(namespace))
    keys = [object_id(root)]
    for start in range(0, len(tokens) // 256 * 256, 256):
        chunk = struct.pack("<256I", *tokens[start : start + 256])
        link = field(b"forkpoint.prefix.link.1") + field(bytes.fromhex(keys[-1][3:])) + field(chunk)
        keys.append(object_id(link))
    return keys


def write_bundle(heads, objects):
    """``objects``: [(kind, bytes), ...]."""
    listed = [{"bytes": len(data), "id": object_id(data), "kind": kind} for kind, data in objects]
    index = write({"format": "forkpoint.bundle", "heads": heads, "objects": listed, "version": 1})
    index += b" " * (-(16 + len(index)) % 64)
    body = b"".join(data + bytes(-len(data) % 64) for _, data in objects)
    return b"FPBUNDLE" + struct.pack("<Q", len(index)) + index + body


def read_bundle(data):
    """(heads, objects), as write_bundle takes them."""
    need(data[:8] == b"FPBUNDLE" and 16 <= len(data) <= 2**40, "no bundle")
    (length,) = struct.unpack("<Q", data[8:16])
    need(length <= 2**26 and 16 + length <= len(data), "no index")
    index = read_versioned(data[16 : 16 + length].rstrip(b" "), "bundle", 2**26)
    fields(index, "format", "heads", "objects", "version")
    objects, at = [], 16 + length
    for item in items(index["objects"]):
        size = count(fields(item, "bytes", "id", "kind")["bytes"])
        need(item["kind"] in ("chunk", "manifest", "move", "tokenizer") and at + size <= len(data), "object")
        objects.append((item["kind"], data[at : at + size]))
        at += size + -size % 64
    heads = [text(head, ID) for head in items(index["heads"])]
    need(len(set(heads)) == len(heads) and len(set(objects)) == len(objects), "something twice")
    need(write_bundle(heads, objects) == data, "not the canonical bundle, or an object that is not what its id says")
    return heads, objects
