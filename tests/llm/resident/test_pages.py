"""The page pool and its memory: sizes that are refused, pages handed out clean, counts that add up."""

from __future__ import annotations

import pytest
import torch
from tests.llm.resident.rows import CPU, GROUPS, TOKEN_BYTES, append, make_strategy, start

from forkpoint.errors import CapacityExceeded, Corrupt, InvalidInput
from forkpoint.llm.kernels.geometry import PageGeometry
from forkpoint.llm.resident.arena import Arena, available_bytes
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.llm.resident.paged import PagedStrategy
from forkpoint.llm.resident.pages import PagePool, count_pages


def make_pool(num_pages: int = 8) -> PagePool:
    return PagePool(GROUPS, page_tokens=16, num_pages=num_pages, device=CPU)


@pytest.mark.parametrize("page_size", [0, 1, 15, 24, 512, -16, True, 16.0, "paged", None])
def test_page_sizes_that_do_not_divide_a_chunk_into_tiles_are_refused(page_size: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        PagedStrategy(GROUPS, max_context=64, device=CPU, page_size=page_size)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_input.page_tokens"


@pytest.mark.parametrize("pool_bytes", [0, -1, 128 * TOKEN_BYTES - 1, True, 1e9])
def test_a_budget_below_one_context_is_refused(pool_bytes: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        PagedStrategy(GROUPS, max_context=128, device=CPU, pool_bytes=pool_bytes)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_input.pool_bytes"
    assert caught.value.data["want"] == 128 * TOKEN_BYTES


def test_a_dtype_that_no_kernel_serves_is_refused() -> None:
    odd = GroupSpec(name="x", layers=(0,), num_heads=1, key_dim=2, value_dim=2, dtype=torch.float64, window=None)
    with pytest.raises(InvalidInput) as caught:
        PagedStrategy([odd], max_context=64, device=CPU)
    assert caught.value.code == "invalid_input.dtype"


def test_a_budget_is_never_passed() -> None:
    strategy = make_strategy(64, num_tokens=1000, max_context=512)
    assert strategy.stats()["pages"] == 1000 // 64
    assert sum(pages.nbytes for pages in strategy.pages) <= 1000 * TOKEN_BYTES


def test_without_a_budget_the_pool_is_a_quarter_of_what_is_free_and_at_least_one_context() -> None:
    pages = count_pages(GROUPS, page_tokens=16, max_context=64, pool_bytes=None, device=CPU)
    free = available_bytes(CPU)
    assert 0.5 < pages * 16 * TOKEN_BYTES / (free / 4) < 2
    huge = free  # tokens: each takes more than a byte
    assert count_pages(GROUPS, page_tokens=16, max_context=huge, pool_bytes=None, device=CPU) == -(-huge // 16)


def test_memory_that_the_system_does_not_have_is_a_typed_error() -> None:
    geometry = PageGeometry(page_tokens=256, num_layers=99, heads=99, key_dim=256, value_dim=256, dtype=torch.float32)
    with pytest.raises(CapacityExceeded) as caught:
        Arena(geometry, 1 << 40, CPU)
    assert caught.value.code == "capacity.memory"


def test_pages_are_aligned_and_laid_out_as_the_kernels_expect() -> None:
    pool = make_pool()
    assert all(pages.data_ptr() % 64 == 0 for pages in pool.tensors)
    assert [pages.shape for pages in pool.tensors] == [(8, 2, 16 * 2 * 5), (8, 1, 16 * 6)]
    assert [pages.dtype for pages in pool.tensors] == [group.dtype for group in GROUPS]


def test_a_leased_page_is_zero_whatever_it_held() -> None:
    pool = make_pool(2)
    for _ in range(5):
        pages = pool.lease(2)
        for arena in pool.arenas:
            assert not arena.tensor.view(torch.uint8).any()
            arena.tensor.fill_(float("nan"))
        pool.release(pages)


def test_a_large_page_is_cleared_from_its_first_byte_to_its_last_and_nothing_beside_it() -> None:
    geometry = PageGeometry(page_tokens=4096, num_layers=3, heads=3, key_dim=45, value_dim=64, dtype=torch.float32)
    assert geometry.page_bytes > 8 << 20
    arena = Arena(geometry, 3, CPU)
    raw = arena.tensor.view(torch.uint8).view(3, -1)
    raw.fill_(255)
    arena.clear(1)
    assert not raw[1].any()
    assert raw[0].all()
    assert raw[2].all()


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40, 64])
def test_copying_tokens_copies_no_token_behind_them(page_tokens: int, count: int) -> None:
    if count > page_tokens:
        return
    geometry = PageGeometry(
        page_tokens=page_tokens, num_layers=2, heads=2, key_dim=3, value_dim=5, dtype=torch.bfloat16
    )
    arena = Arena(geometry, 2, CPU)
    arena.tensor[0] = torch.arange(1, arena.tensor[0].numel() + 1).view_as(arena.tensor[0]).remainder(250).add(1)
    arena.copy_tokens(0, 1, count)
    # Both as [layers, tokens, heads, dim].
    keys = geometry.keys(arena.tensor).permute(0, 1, 2, 5, 3, 4).reshape(2, 2, page_tokens, -1)
    values = geometry.values(arena.tensor).permute(0, 1, 2, 4, 3, 5).reshape(2, 2, page_tokens, -1)
    for part in (keys, values):
        assert torch.equal(part[1, :, :count], part[0, :, :count])
        assert not part[1, :, count:].any()


def test_a_page_is_free_when_neither_a_table_nor_a_reader_holds_it() -> None:
    pool = make_pool()
    pages = pool.lease(3)
    pool.share(pages[:1])
    pool.pin(pages[1:2])
    assert pool.release(pages) == 1
    pool.unpin(pages[1:2])
    assert pool.num_free == 7
    assert pool.release(pages[:1]) == 1
    assert pool.num_free == 8
    pool.check(())


@pytest.mark.parametrize("harm", ["count", "leak", "twice"])
def test_the_integrity_check_sees_what_is_wrong(harm: str) -> None:
    strategy = make_strategy()
    state = append(start(strategy, range(40)), range(5))
    strategy.check()
    pool = strategy.ledger.pool
    if harm == "count":
        pool.references[state.table.pages[0]] += 1
    elif harm == "leak":
        pool.lease(1)
    else:
        pool._freed.append(int(state.table.pages[1]))
    with pytest.raises(Corrupt) as caught:
        strategy.check()
    assert caught.value.code == "corrupt.pool"


def test_a_full_pool_says_what_it_holds_and_what_would_free_space() -> None:
    strategy = make_strategy(16, num_tokens=64, max_context=64)
    state = start(strategy, range(40))
    with pytest.raises(CapacityExceeded, match="close or let go of continuations") as caught:
        start(strategy, range(40))
    assert caught.value.code == "capacity.pages"
    facts = {"want": 3, "have": 4, "free": 1, "held": 3, "evictable": 0, "lineages": 2}
    assert caught.value.data.items() >= facts.items()
    strategy.check()
    del state
    assert strategy.stats()["pages_free"] == 4
