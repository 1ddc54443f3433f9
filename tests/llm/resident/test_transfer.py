"""Restoring, evicting and bringing back by chunks: verified before anything shows, and a failure changes nothing."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.llm.resident.rows import (
    GROUPS,
    ChunkShelf,
    append,
    encoded_chunk,
    make_strategy,
    read_state,
    slab_bytes,
    start,
    state_bytes,
)

from forkpoint.errors import CapacityExceeded, Corrupt, NotFound
from forkpoint.ids import digest_of
from forkpoint.llm.resident.paged import PagedState, PagedStrategy
from forkpoint.llm.resident.pages import PageSize
from forkpoint.state.chunk import parse_chunk
from forkpoint.state.manifest import ChunkRef


def used_pages_digest(strategy: PagedStrategy) -> str:
    """Digest of everything in pages that somebody holds, and of who holds them."""
    pool = strategy.ledger.pool
    held = (pool.references > 0).nonzero()[0].tolist()
    raw = [arena.tensor[page].view(-1).float().numpy().tobytes() for arena in pool.arenas for page in held]
    return digest_of([pool.references.tobytes(), *raw])


@pytest.mark.parametrize("page_size", [16, 128, "contiguous"])
@pytest.mark.parametrize("length", [0, 1, 255, 256, 700])
def test_a_restored_state_has_the_bytes_that_were_captured_and_goes_on(page_size: PageSize, length: int) -> None:
    strategy, shelf = make_strategy(page_size), ChunkShelf()
    tokens = list(range(length))
    state = shelf.restore(strategy, tokens).finish(prefilled=length // 256 * 256)
    assert read_state(state) == state_bytes(tokens)
    assert state.prefilled == length // 256 * 256
    assert [state.chunk_ref(1, index) is not None for index in range(3)] == [
        index < length // 256 for index in range(3)
    ]
    assert read_state(append(state, [1, 2])) == state_bytes([*tokens, 1, 2])
    strategy.check()


def test_chunks_of_any_size_may_be_written_in_any_order_by_several_threads() -> None:
    strategy = make_strategy()
    tokens = list(range(601))
    restoration = strategy.restore(len(tokens))
    work = []
    for group in range(len(GROUPS)):
        for first in range(0, len(tokens), 37):
            data = encoded_chunk(group, first, tokens[first : first + 37])
            domain = (("token", first, min(first + 37, len(tokens))),)
            ref = ChunkRef(chunk_id=digest_of([data]), num_bytes=len(data), domain=domain)
            work.append((group, first, parse_chunk(data), ref))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda item: restoration.write_chunk(*item), reversed(work)))
    assert read_state(restoration.finish(prefilled=0)) == state_bytes(tokens)


@pytest.mark.parametrize("end", ["abort", "drop"])
def test_a_restoration_that_fails_leaves_used_pages_byte_for_byte_as_they_were(end: str) -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    state = start(strategy, range(300))
    before, figures = used_pages_digest(strategy), strategy.stats()
    restoration = shelf.restore(strategy, [9] * 600)
    if end == "abort":
        restoration.abort()
        restoration.abort()
    else:
        del restoration
        gc.collect()
    assert strategy.stats() == figures
    assert used_pages_digest(strategy) == before
    assert read_state(state) == state_bytes(range(300))


def committed(strategy: PagedStrategy, shelf: ChunkShelf, tokens: list[int]) -> PagedState:
    state = start(strategy, tokens)
    shelf.commit(state, tokens)
    return state


def test_only_full_chunks_that_are_durable_are_evicted_and_using_the_state_brings_them_back() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(600))
    state = start(strategy, tokens)
    assert strategy.evict() == 0
    shelf.commit(state, tokens)
    assert strategy.evict() == 32
    assert not state.is_resident
    assert strategy.stats()["pages_held"] == 6
    assert read_state(state) == state_bytes(tokens)  # from where it is stored; it stays there
    assert not state.is_resident
    longer = append(state, [1])
    assert state.is_resident
    assert read_state(longer) == state_bytes([*tokens, 1])
    assert strategy.stats()["chunks_refilled_ever"] == 2
    strategy.check()


def test_an_id_without_a_source_makes_no_chunk_evictable_and_a_source_is_not_forgotten() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(256))
    state = start(strategy, tokens)
    refs = [shelf.put(group, 0, tokens) for group in range(len(GROUPS))]
    for group, ref in enumerate(refs):
        state.remember_chunk(group, 0, ref)
    assert strategy.evict() == 0
    state.remember_chunk(0, 0, refs[0], shelf.fetch)
    assert strategy.evict() == 0
    state.remember_chunk(1, 0, refs[1], shelf.fetch)
    state.remember_chunk(1, 0, refs[1])
    assert strategy.evict() == 16


def test_a_full_pool_evicts_what_was_used_least_recently() -> None:
    strategy, shelf = make_strategy(16, num_tokens=1024, max_context=1024), ChunkShelf()
    prompts = [[seed] * 256 for seed in range(3)]
    states = [committed(strategy, shelf, prompt) for prompt in prompts]
    append(states[0], [7])
    other = start(strategy, range(400))
    assert [state.is_resident for state in states] == [True, False, True]
    assert [read_state(state) for state in states] == [state_bytes(prompt) for prompt in prompts]
    assert read_state(other) == state_bytes(range(400))
    strategy.check()


def test_a_chunk_that_forks_share_is_evicted_from_all_of_them_at_once_or_not_at_all() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(256))
    parent = committed(strategy, shelf, tokens)
    forks = [append(parent, [token]) for token in range(3)]
    reservation = forks[2].reserve(1)
    assert strategy.evict() == 0
    assert all(fork.is_resident for fork in forks)
    reservation.abort()
    assert strategy.evict() == 16
    assert not any(fork.is_resident for fork in forks)
    grown = [append(fork, [5]) for fork in forks]
    assert [read_state(fork) for fork in grown] == [state_bytes([*tokens, token, 5]) for token in range(3)]
    strategy.check()


def test_what_one_fork_knows_of_shared_pages_holds_for_the_others() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(256))
    parent = start(strategy, tokens)
    forks = [append(parent, [token]) for token in range(2)]
    shelf.commit(forks[1], [*tokens, 1])
    assert strategy.evict() == 16
    assert read_state(forks[0]) == state_bytes([*tokens, 0])


def test_nothing_is_evicted_while_it_is_read_or_written() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    state = committed(strategy, shelf, list(range(256)))
    with strategy.ledger.reading(state.table, 0, 256):
        assert strategy.evict() == 0
        assert state.is_resident
    with strategy.ledger.using([state.table]):
        assert strategy.evict() == 0
    reservation = state.reserve(1)
    assert strategy.evict() == 0
    reservation.abort()
    assert strategy.evict(state=state) == 16


def test_a_chunk_that_cannot_be_brought_back_leaves_the_state_as_it_was() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(600))
    state = committed(strategy, shelf, tokens)
    strategy.evict()
    figures, used = strategy.stats(), used_pages_digest(strategy)
    lost = shelf.chunks.popitem()
    with pytest.raises(NotFound):
        state.reserve(1)
    assert (strategy.stats(), used_pages_digest(strategy)) == (figures, used)
    shelf.chunks[lost[0]] = encoded_chunk(1, 0, tokens[:256])  # another chunk's bytes under this id
    with pytest.raises(Corrupt):
        state.reserve(1)
    assert (strategy.stats(), used_pages_digest(strategy)) == (figures, used)
    shelf.chunks.update([lost])
    assert read_state(append(state, [1])) == state_bytes([*tokens, 1])


def test_a_pool_too_full_to_bring_a_state_back_says_so_and_the_state_can_still_be_read() -> None:
    strategy, shelf = make_strategy(16, num_tokens=512, max_context=512), ChunkShelf()
    tokens = list(range(512))
    state = committed(strategy, shelf, tokens)
    strategy.evict()
    other = start(strategy, range(300))
    part = state.prefix(511)
    with pytest.raises(CapacityExceeded) as caught:
        part.reserve(1)
    assert caught.value.code == "capacity.pages"
    assert read_state(state) == state_bytes(tokens)
    del other, state
    assert read_state(append(part, [3])) == state_bytes([*range(511), 3])


def test_the_beginning_of_an_evicted_chunk_comes_back_when_only_that_is_left_alive() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(512))
    state = committed(strategy, shelf, tokens)
    part = state.prefix(300)
    strategy.evict()
    del state
    assert read_state(part) == state_bytes(range(300))
    longer = append(part, [8] * 300)
    assert longer.chunk_ref(0, 1) is None  # other tokens than were stored under that id
    assert read_state(longer) == state_bytes([*range(300), *[8] * 300])
    strategy.check()


def test_an_id_is_forgotten_with_the_tokens_it_stood_for_though_other_chunks_are_missing() -> None:
    strategy, shelf = make_strategy(), ChunkShelf()
    tokens = list(range(768))
    state = committed(strategy, shelf, tokens)
    part = state.prefix(300)
    strategy.evict(16)  # the last chunk
    assert strategy.stats()["pages_evicted"] == 16
    del state
    longer = append(part, [8] * 300)
    assert [longer.chunk_ref(0, index) is None for index in range(2)] == [False, True]


def test_pieces_are_one_a_layer_in_the_order_of_layers() -> None:
    strategy = make_strategy()
    state = start(strategy, range(300))
    keys, values = state.slab_pieces(0, 250, 290)
    assert [bytes(piece) for piece in keys] == [layer.tobytes() for layer in slab_bytes(0, "k", range(250, 290))]
    assert [bytes(piece) for piece in values] == [layer.tobytes() for layer in slab_bytes(0, "v", range(250, 290))]
    assert state.slab_pieces(0, 10, 10) == ([], [])
