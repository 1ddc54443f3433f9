"""Chunks to pages and back: equal bytes, natively and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels import transfer
from forkpoint.llm.kernels.geometry import PageGeometry
from forkpoint.llm.kernels.transfer import gather_chunk, scatter_chunk

TABLE = [7, 2, 9, 0, 5, 1, 8, 3, 11, 4, 6, 10]


def geometry(dtype: torch.dtype, *, page_tokens: int = 32, dims: tuple[int, int] = (24, 40)) -> PageGeometry:
    return PageGeometry(page_tokens=page_tokens, num_layers=3, heads=2, key_dim=dims[0], value_dim=dims[1], dtype=dtype)


def chunk(shape: PageGeometry, count: int) -> tuple[bytes, bytes]:
    random = np.random.default_rng(count)
    sizes = (3 * count * 2 * dim * shape.dtype.itemsize for dim in (shape.key_dim, shape.value_dim))
    keys, values = (random.bytes(size) for size in sizes)
    return keys, values


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(transfer, "find_native", lambda: None)
    return str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("start", "count"), [(0, 256), (64, 256), (5, 300), (31, 2), (17, 1), (40, 0)])
@pytest.mark.parametrize(("page_tokens", "dims"), [(32, (24, 40)), (64, (64, 16)), (512, (16, 16))])
def test_what_was_scattered_is_gathered_byte_for_byte(
    dtype: torch.dtype, start: int, count: int, page_tokens: int, dims: tuple[int, int]
) -> None:
    shape = geometry(dtype, page_tokens=page_tokens, dims=dims)
    pages = torch.full((12, 3, shape.layer_elements), 7.0, dtype=dtype)
    keys, values = chunk(shape, count)
    scatter_chunk(pages, TABLE, start, count, memoryview(keys), memoryview(values), shape)
    read = gather_chunk(pages, np.array(TABLE, dtype=np.int32), start, count, shape)
    assert (read[0].tobytes(), read[1].tobytes()) == (keys, values)
    assert int((pages == 7.0).sum()) >= pages.numel() - (len(keys) + len(values)) // dtype.itemsize


@pytest.mark.parametrize(("start", "count"), [(0, 256), (5, 300)])
def test_native_and_torch_put_bytes_in_the_same_places(start: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = geometry(torch.bfloat16)
    arenas = [torch.zeros(12, 3, shape.layer_elements, dtype=torch.bfloat16) for _ in range(2)]
    scatter_chunk(arenas[0], TABLE, start, count, *chunk(shape, count), shape)
    monkeypatch.setattr(transfer, "find_native", lambda: None)
    scatter_chunk(arenas[1], TABLE, start, count, *chunk(shape, count), shape)
    assert torch.equal(arenas[0].view(torch.int16), arenas[1].view(torch.int16))


def test_keys_lie_sixteen_tokens_side_by_side_and_values_token_by_token() -> None:
    shape = geometry(torch.float32)
    pages = torch.zeros(12, 3, shape.layer_elements)
    keys = torch.arange(3 * 20 * 2 * 24, dtype=torch.float32).view(3, 20, 2, 24)
    values = torch.arange(3 * 20 * 2 * 40, dtype=torch.float32).view(3, 20, 2, 40)
    scatter_chunk(pages, TABLE, 0, 20, keys.numpy().tobytes(), values.numpy().tobytes(), shape)
    assert torch.equal(shape.keys(pages)[7, 1, 0, 1, :, 5], keys[1, 5, 1])
    assert torch.equal(shape.values(pages)[7, 2, 1, 0, 3], values[2, 19, 0])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("table", "start", "count"), [([0, 1], 60, 5), ([0, 12], 30, 5), ([0, -1], 30, 5), ([0, 1], -1, 5)]
)
def test_tokens_without_a_page_are_refused_and_nothing_is_written(table: list[int], start: int, count: int) -> None:
    shape = geometry(torch.float32)
    pages = torch.zeros(12, 3, shape.layer_elements)
    with pytest.raises(InvalidInput) as refusal:
        scatter_chunk(pages, table, start, count, *chunk(shape, count), shape)
    assert refusal.value.code == "invalid_input.chunk"
    assert not pages.any()


@pytest.mark.usefixtures("path")
def test_slabs_of_another_length_and_pages_of_another_shape_are_refused() -> None:
    shape = geometry(torch.float32)
    pages = torch.zeros(12, 3, shape.layer_elements)
    keys, values = chunk(shape, 20)
    with pytest.raises(InvalidInput, match="slab"):
        scatter_chunk(pages, TABLE, 0, 20, keys, values[:-4], shape)
    with pytest.raises(InvalidInput, match="shape"):
        scatter_chunk(pages[..., :-16], TABLE, 0, 20, keys, values, shape)
    with pytest.raises(InvalidInput, match="shape"):
        gather_chunk(pages.bfloat16(), TABLE, 0, 20, shape)
    assert not pages.any()
