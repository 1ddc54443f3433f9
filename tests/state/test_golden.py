"""The golden vectors, and the second reader that was written from FORMAT.md: both must agree with Forkpoint byte for byte."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import second_reader
import state_values as sv
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from forkpoint.errors import Error
from forkpoint.ids import digest_of
from forkpoint.state.bundle import BundleEntry, encode_bundle, parse_bundle
from forkpoint.state.canonical import canonical_bytes, from_float, parse_canonical
from forkpoint.state.chunk import encode_chunk, parse_chunk
from forkpoint.state.manifest import decode_manifest, encode_manifest
from forkpoint.state.move import decode_move, encode_move
from forkpoint.state.prefix import prefix_keys, root_key
from forkpoint.state.slab import Slab

GOLDEN = Path(__file__).parents[1] / "golden"
IDS = json.loads((GOLDEN / "ids.json").read_text())
CASES = json.loads((GOLDEN / "canonical.json").read_text())
PREFIX = json.loads((GOLDEN / "prefix.json").read_text())
FILES = {name: (GOLDEN / name).read_bytes() for name in IDS}


def rewrite_chunk(data: bytes) -> bytes:
    chunk = parse_chunk(data)
    slabs = [Slab(spec=spec, pieces=[chunk.slabs[name]]) for name, spec in chunk.specs.items()]
    return sv.joined(encode_chunk(slabs, chunk.domain))


def rewrite_bundle(data: bytes) -> bytes:
    bundle = parse_bundle(data)
    entries = [BundleEntry(kind=key[0], object_id=key[1], parts=[view]) for key, view in bundle.objects.items()]
    return sv.joined(encode_bundle(bundle.heads, entries))


OURS = {
    "chunk.safetensors": rewrite_chunk,
    "manifest.json": lambda data: encode_manifest(decode_manifest(data)),
    "move.json": lambda data: encode_move(decode_move(data)),
    "bundle.bin": rewrite_bundle,
}
THEIRS = {
    "chunk.safetensors": lambda data: second_reader.write_chunk(*second_reader.read_chunk(data)),
    "manifest.json": lambda data: second_reader.write(second_reader.read_manifest(data)),
    "move.json": lambda data: second_reader.write(second_reader.read_move(data)),
    "bundle.bin": lambda data: second_reader.write_bundle(*second_reader.read_bundle(data)),
}


@pytest.mark.parametrize("name", sorted(IDS))
def test_golden_files_are_read_and_written_as_they_are(name):
    data = FILES[name]
    assert digest_of([data]) == second_reader.object_id(data) == IDS[name]
    assert OURS[name](data) == data
    assert THEIRS[name](data) == data


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["bytes"][:24])
def test_golden_values_have_their_bytes_and_ids(case):
    data = bytes.fromhex(case["bytes"])
    assert canonical_bytes(case["value"]) == second_reader.write(case["value"]) == data
    assert parse_canonical(data, "case") == second_reader.read(data) == case["value"]
    assert digest_of([data]) == case["id"]


def test_golden_prefix_keys_hold():
    state_id, namespace, tokens = PREFIX["state_id"], PREFIX["namespace"], PREFIX["tokens"]
    assert [root_key(state_id, namespace), *prefix_keys(state_id, namespace, tokens)] == PREFIX["keys"]
    assert second_reader.prefix_keys(state_id, namespace, tokens) == PREFIX["keys"]


def test_the_script_makes_these_very_files_and_refuses_to_overwrite_them(capsys):
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    made = make.vectors()
    assert {name: (GOLDEN / name).read_bytes() for name in made} == made
    assert make.main([]) == 1
    assert "refused" in capsys.readouterr().out


def test_the_second_reader_stands_on_the_standard_library_and_blake3_alone():
    tree = ast.parse((GOLDEN / "second_reader.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "blake3", "math", "re", "struct"}


def test_the_stock_safetensors_library_reads_the_chunk():
    arrays = load(FILES["chunk.safetensors"])
    chunk = parse_chunk(FILES["chunk.safetensors"])
    assert {name for name in arrays if not name.startswith("~pad")} == set(chunk.specs)
    for name, spec in chunk.specs.items():
        assert arrays[name].shape == spec.shape
        assert arrays[name].tobytes() == bytes(chunk.slabs[name])
    assert arrays["clock"] == -5
    assert np.array_equal(arrays["tokens"], np.array([7, 0, 2**32 - 1], dtype=np.uint32))


@given(sv.slab_lists(), sv.domains())
def test_both_writers_make_the_same_chunk(slabs, domain):
    plain = {
        slab.spec.name: (slab.spec.dtype, list(slab.spec.shape), list(slab.spec.axes), sv.joined(slab.pieces))
        for slab in slabs
    }
    data = sv.joined(encode_chunk(slabs, domain))
    assert second_reader.write_chunk(plain, list(domain)) == data
    assert second_reader.read_chunk(data) == (plain, list(domain))


@given(sv.values)
def test_both_writers_make_the_same_record(value):
    data = canonical_bytes(value)
    assert second_reader.write(value) == data
    assert second_reader.read(data) == value


@given(sv.floats)
def test_both_writers_make_the_same_float(number):
    assert {"f64": second_reader.float_text(number)} == from_float(number)


@given(sv.manifests(), sv.moves)
def test_both_readers_see_the_same_manifests_and_moves(manifest, move):
    for data, theirs in (
        (encode_manifest(manifest), second_reader.read_manifest),
        (encode_move(move), second_reader.read_move),
    ):
        assert second_reader.write(theirs(data)) == data


@given(st.lists(sv.ids, max_size=2, unique=True), sv.bundle_entries())
def test_both_writers_make_the_same_bundle(heads, entries):
    plain = [(str(entry.kind), sv.joined(entry.parts)) for entry in entries]
    data = sv.joined(encode_bundle(heads, entries))
    assert second_reader.write_bundle(heads, plain) == data
    assert second_reader.read_bundle(data) == (heads, plain)


@given(st.text(), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3), st.integers(0, 600))
def test_both_derive_the_same_prefix_keys(namespace, seeds, length):
    tokens = [seeds[index % len(seeds)] for index in range(length)]
    state_id = digest_of([b"state"])
    keys = [root_key(state_id, namespace), *prefix_keys(state_id, namespace, tokens)]
    assert second_reader.prefix_keys(state_id, namespace, tokens) == keys


def verdict(read_and_write, data: bytes) -> bytes | None:
    try:
        return read_and_write(data)
    except (Error, second_reader.Refused):
        return None


@pytest.mark.parametrize("name", sorted(IDS))
@given(data=st.data())
def test_both_readers_accept_and_refuse_alike(name, data):
    mutated = data.draw(sv.mutations(FILES[name]))
    assert verdict(OURS[name], mutated) == verdict(THEIRS[name], mutated)


@given(st.binary(max_size=24) | st.text(alphabet='[]{}",:01-\\nu\x00é', max_size=16).map(str.encode))
def test_both_readers_of_records_accept_and_refuse_alike(data):
    ours = verdict(lambda raw: canonical_bytes(parse_canonical(raw, "test")), data)
    assert ours == verdict(lambda raw: second_reader.write(second_reader.read(raw)), data)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ({"a": (None, 1)}, ["a"]),
        ({"a": (None, 1), "b": ("a", 2), "c": ("b", 3)}, ["a", "b", "c"]),
        ({"a": (None, 1), "b": ("a", 2), "c": ("a", 3)}, ["a", "c"]),
        ({"a": (None, 1), "b": ("a", 2), "c": ("a", 3), "d": ("b", 4)}, ["a", "b", "d"]),
        ({"a": (None, 5), "b": (None, 1), "c": ("b", 2)}, ["b", "c"]),
        ({"b": ("purged", 2), "c": ("b", 3)}, ["b", "c"]),
        ({"b": ("purged", 5), "a": (None, 1), "c": ("lost", 3)}, ["a", "c", "b"]),
        ({"a": (None, 1), "b": ("purged", 5), "c": ("purged", 6)}, ["a", "c"]),
    ],
)
def test_refs_are_rebuilt_by_the_rule_of_the_page(moves, expected):
    records = {
        key: {"ref": "HEAD", "previous": previous, "tx": tx, "at_us": 0} for key, (previous, tx) in moves.items()
    }
    assert second_reader.rebuilt_reflog(records, "HEAD") == expected
