"""Views of rows: whatever torch's own strides say of one row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.llm.resident.layouts import ROW, View, row_major
from forkpoint.llm.resident.tracing import Unlowerable

_ROWS = 3


def _elements(view: View, buffer: torch.Tensor) -> torch.Tensor:
    """What a view shows of a buffer ``[rows width]``."""
    shape = [_ROWS if size == ROW else size for size in view.shape]
    row_stride = buffer.shape[1]
    strides = [row_stride if size == ROW else stride for size, stride in zip(view.shape, view.strides, strict=True)]
    return buffer.as_strided(shape, strides, view.offset)


@given(st.data())
def test_views_of_views_show_what_torch_shows(data: st.DataObject) -> None:
    buffer = torch.arange(_ROWS * 24).reshape(_ROWS, 24)
    view, expected = row_major(0, (1, ROW, 2, 3, 4)), buffer.reshape(1, _ROWS, 2, 3, 4)
    for _ in range(data.draw(st.integers(1, 6))):
        dims = len(view.shape)
        what = data.draw(st.sampled_from(["permute", "insert", "narrow", "flatten"]))
        if what == "permute":
            order = data.draw(st.permutations(range(dims)))
            view, expected = view.permute(order), expected.permute(order)
        elif what == "insert":
            dim = data.draw(st.integers(0, dims))
            view, expected = view.insert(dim), expected.unsqueeze(dim)
        elif what == "narrow":
            dim = data.draw(st.integers(0, dims - 1))
            if view.shape[dim] < 2:
                continue
            view, expected = view.narrow(dim, 1, view.shape[dim]), expected.narrow(dim, 1, view.shape[dim] - 1)
        else:
            joined = view.reshape([ROW, view.width]) if view.shape[0] == ROW else None
            if joined is None:
                continue
            view, expected = joined, expected.reshape(_ROWS, -1)
        assert torch.equal(_elements(view, buffer), expected)


def test_a_reshape_that_would_need_a_copy_says_so() -> None:
    transposed = row_major(0, (ROW, 2, 3)).permute([0, 2, 1])
    assert transposed.reshape((ROW, 6)) is None
    assert transposed.reshape((ROW, 3, 1, 2)) is not None


def test_rows_are_never_joined_with_another_dimension() -> None:
    heads_first = row_major(0, (ROW, 2, 4)).permute([1, 0, 2])
    with pytest.raises(Unlowerable) as refused:
        heads_first.reshape((2 * _ROWS, 4))
    assert refused.value.refusal.code == "layout"
    with pytest.raises(Unlowerable):
        heads_first.reshape((ROW, 8))


def test_a_part_of_the_rows_is_no_view() -> None:
    with pytest.raises(Unlowerable):
        row_major(0, (ROW, 4)).narrow(0, 0, 1)


def test_broadcasting_reads_one_element_for_many() -> None:
    view = row_major(0, (1, ROW, 1)).expand((2, ROW, 5))
    buffer = torch.arange(_ROWS).reshape(_ROWS, 1)
    assert torch.equal(_elements(view, buffer), buffer.reshape(1, _ROWS, 1).expand(2, _ROWS, 5))
