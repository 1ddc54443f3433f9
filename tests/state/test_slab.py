from __future__ import annotations

import pytest

from forkpoint.errors import InvalidInput
from forkpoint.state.slab import MAX_ELEMENTS, Slab, SlabSpec


def spec(**changes) -> SlabSpec:
    sound = {"name": "k", "dtype": "F32", "shape": (2, 3), "axes": ("row", "column")}
    return SlabSpec(**(sound | changes))


def test_size_is_elements_times_bytes():
    assert spec().num_bytes == 24
    assert spec(shape=(), axes=()).num_bytes == 4
    assert spec(shape=(0, 7)).num_bytes == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "K"}, "name"),
        ({"name": "k\n"}, "name"),
        ({"name": "~pad0001"}, "name"),
        ({"name": "größe"}, "name"),
        ({"name": "k" * 129}, "name"),
        ({"name": 7}, "name"),
        ({"dtype": "f32"}, "dtype"),
        ({"dtype": "F4"}, "dtype"),
        ({"axes": ("row",)}, "axes"),
        ({"axes": ("row", "row")}, "axes"),
        ({"axes": ("row", "a,b")}, "axes"),
        ({"axes": ("row", "")}, "axes"),
        ({"axes": ("row", None)}, "axes"),
        ({"shape": (1,) * 9, "axes": tuple("abcdefghi")}, "axes"),
        ({"shape": (2, -1)}, "shape"),
        ({"shape": (2, True)}, "shape"),
        ({"shape": (2, 3.0)}, "shape"),
        ({"shape": (2, MAX_ELEMENTS)}, "shape"),
        ({"shape": (0, 2**63)}, "shape"),
        ({"shape": (MAX_ELEMENTS, MAX_ELEMENTS, 0), "axes": ("a", "b", "c")}, "shape"),
    ],
)
def test_a_spec_outside_the_format_is_refused_by_field(changes, field):
    with pytest.raises(InvalidInput) as caught:
        spec(**changes)
    assert caught.value.code == "invalid_input.slab"
    assert caught.value.data["field"] == field


def test_a_slab_needs_exactly_its_bytes():
    Slab(spec=spec(), pieces=[bytes(20), bytearray(4)])
    with pytest.raises(InvalidInput) as caught:
        Slab(spec=spec(), pieces=[bytes(25)])
    assert (caught.value.data["have"], caught.value.data["want"]) == (25, 24)


def test_a_piece_with_gaps_is_refused():
    with pytest.raises(InvalidInput, match="not contiguous"):
        Slab(spec=spec(), pieces=[memoryview(bytes(48))[::2]])
