"""Which lanes are computed together: those whose pages in a block of 256 positions are the same."""

from __future__ import annotations

import pytest
import torch

from forkpoint.llm.kernels.geometry import PageGeometry
from forkpoint.llm.kernels.native import find_native

pytestmark = pytest.mark.skipif(find_native() is None, reason="no native kernels here")

Shared = list[tuple[int, list[int]]]


def describe(
    segments: list[tuple[int, int, int]], tables: list[list[int]], *, page_tokens: int = 16, num_pages: int = 1000
) -> tuple[Shared, list[tuple[int, int, int]]]:
    native = find_native()
    assert native is not None
    width, rows = max(map(len, tables)), max(first + count for first, count, _ in segments)
    geometry = PageGeometry(
        page_tokens=page_tokens, num_layers=1, heads=1, key_dim=16, value_dim=16, dtype=torch.float32
    )
    routes = torch.tensor(segments)
    padded = torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.int32)
    shared, tiles = native.describe_routes(
        geometry.native_shape, rows, num_pages, routes.data_ptr(), len(segments), padded.data_ptr(), width
    )
    return shared, tiles


def test_a_shared_prefix_is_read_once_for_all_lanes() -> None:
    prefix = list(range(32))
    tables = [[*prefix, 40 + lane] for lane in range(8)]
    shared, _ = describe([(lane, 1, 515) for lane in range(8)], tables)
    assert [(block, len(members)) for block, members in shared] == [(0, 8), (1, 8)] + [(2, 1)] * 8


def test_a_tree_of_forks_shares_as_far_as_it_has_pages_in_common() -> None:
    first, second = [100 + page for page in range(16)], [200 + page for page in range(16)]
    tables = [[*range(16), *(first if lane % 2 else second), 40 + lane] for lane in range(4)]
    shared, _ = describe([(lane, 1, 513) for lane in range(4)], tables)
    groups = {(block, tuple(sorted(members))) for block, members in shared}
    assert {(0, (0, 1, 2, 3)), (1, (0, 2)), (1, (1, 3))} <= groups
    assert sum(block == 2 for block, _ in groups) == 4


def test_lanes_that_differ_in_one_page_of_a_block_are_not_joined() -> None:
    shared, _ = describe([(0, 1, 255), (1, 1, 255)], [[*range(16)], [*range(15), 99]])
    assert shared == [(0, [0]), (0, [1])] or shared == [(0, [1]), (0, [0])]


def test_pages_past_a_lanes_own_end_do_not_matter() -> None:
    shared, _ = describe([(0, 1, 20), (1, 1, 25)], [[5, 6, 7], [5, 6, 8]])
    assert [(block, sorted(members)) for block, members in shared] == [(0, [0, 1])]


def test_long_segments_are_cut_into_tiles_of_rows_and_cover_all_of_them() -> None:
    shared, tiles = describe([(0, 100, 0), (100, 1, 5)], [[*range(7)], [9]])
    assert shared == [(0, [1])]
    assert sorted(row for segment, first, rows in tiles if segment == 0 for row in range(first, first + rows)) == list(
        range(100)
    )


def test_contiguous_lanes_of_one_page_share_nothing_by_accident() -> None:
    shared, _ = describe([(0, 1, 300), (1, 1, 300)], [[3], [4]], page_tokens=4096)
    assert sorted(shared) == [(0, [0]), (0, [1]), (1, [0]), (1, [1])]


def test_segments_that_share_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="share a row"):
        describe([(0, 2, 0), (1, 1, 0)], [[1], [2]])
