"""States over shared pages: what is shared, what is copied, what dies when, and that no state ever holds another's rows."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc

import pytest
from tests.llm.resident.rows import ChunkShelf, append, make_strategy, read_state, start, state_bytes, write_rows

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.llm.resident.pages import PageSize
from forkpoint.llm.resident.reservation import count_prefilled

PAGE_SIZES: tuple[PageSize, ...] = (16, 64, 256, "contiguous")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 300])
def test_forks_in_mid_page_hold_what_independent_runs_hold(page_size: PageSize, length: int) -> None:
    """C9: both append different tokens, one is freed, counts stay exact."""
    strategy = make_strategy(page_size, num_tokens=8192)
    prompt = list(range(length))
    parent = start(strategy, prompt)
    left = append(parent, [1000 + token for token in range(20)])
    right = append(parent, [2000 + token for token in range(40)])
    strategy.check()
    assert read_state(left) == state_bytes(prompt + [1000 + token for token in range(20)])
    assert read_state(right) == state_bytes(prompt + [2000 + token for token in range(40)])
    del left
    right = append(right, [7, 8, 9])
    again = append(parent, [3000])
    strategy.check()
    assert read_state(parent) == state_bytes(prompt)
    assert read_state(right) == state_bytes([*prompt, *(2000 + token for token in range(40)), 7, 8, 9])
    assert read_state(again) == state_bytes([*prompt, 3000])
    del parent, right, again
    assert strategy.num_lineages() == 0
    assert strategy.stats()["pages_free"] == strategy.stats()["pages"]


def test_the_longest_state_goes_on_in_place_and_leases_a_page_only_at_its_border() -> None:
    strategy = make_strategy()
    state = start(strategy, range(16))
    for token in range(33):
        state = append(state, [token])
        assert strategy.stats()["pages_held"] == 1 + -(-(token + 1) // 16)
    assert strategy.num_lineages() == 1


def test_a_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    strategy = make_strategy()
    parent = start(strategy, range(40))
    first, second = append(parent, [1]), append(parent, [2])
    assert strategy.stats()["pages_held"] == 4
    assert (first.table.pages[:2] == second.table.pages[:2]).all()
    assert first.table.pages[2] != second.table.pages[2]


def test_a_thousand_forks_that_write_nothing_hold_no_page_and_little_memory() -> None:
    strategy = make_strategy()
    parent = start(strategy, range(2000))
    held = strategy.stats()["pages_held"]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    forks = [parent.prefix(1990) for _ in range(1000)]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1000 * 512
    assert strategy.stats()["pages_held"] == held
    assert strategy.num_lineages() == 1
    del forks


def test_a_page_that_another_table_shares_is_not_appended_to_when_the_mark_falls_below_it() -> None:
    strategy = make_strategy()
    short = start(strategy, range(20))
    parent = append(short, range(20, 40))
    in_place = append(parent, [1])
    fork = append(parent, [2])  # shares the page of tokens 16 to 31
    del parent, in_place
    longer = append(short, [9] * 5)
    assert read_state(fork) == state_bytes([*range(40), 2])
    assert read_state(longer) == state_bytes([*range(20), *[9] * 5])
    assert read_state(short) == state_bytes(range(20))
    strategy.check()


def test_pages_behind_the_longest_live_state_are_given_back() -> None:
    strategy = make_strategy()
    short = start(strategy, range(20))
    long = append(short, range(100))
    assert strategy.stats()["pages_held"] == 8
    del long
    assert strategy.stats()["pages_held"] == 2
    assert append(short, [1]).table is short.table


def test_a_state_that_dies_inside_garbage_collection_only_enqueues() -> None:
    strategy = make_strategy()
    cycle: list[object] = [start(strategy, range(40))]
    cycle.append(cycle)
    with strategy.ledger._lock:  # a release that took the lock here would wait for ever
        del cycle
        gc.collect()
        assert strategy.ledger.pool.num_held == 3
    assert strategy.stats()["pages_held"] == 0


def test_an_aborted_reservation_leaves_every_count_as_it_was() -> None:
    strategy = make_strategy()
    parent = start(strategy, range(40))
    other = append(parent, [1])
    for state in (parent, other):
        before = strategy.stats(), strategy.ledger.pool.references.copy().tolist()
        reservation = state.reserve(100)
        write_rows(strategy, reservation, range(100))
        reservation.abort()
        assert (strategy.stats(), strategy.ledger.pool.references.tolist()) == before
    assert read_state(parent) == state_bytes(range(40))
    assert read_state(other) == state_bytes([*range(40), 1])


def test_a_reservation_that_is_dropped_is_aborted() -> None:
    strategy = make_strategy()
    parent = start(strategy, range(40))
    reservation = parent.reserve(100)
    del reservation
    assert strategy.stats()["pages_held"] == 3
    assert append(parent, [1]).table is parent.table


def test_many_states_are_reserved_for_one_pass_or_none_is() -> None:
    strategy = make_strategy(16, num_tokens=128, max_context=128)
    states = [start(strategy, range(20)) for _ in range(3)]
    before = strategy.ledger.pool.references.tolist()
    with pytest.raises(CapacityExceeded) as caught:
        strategy.reserve_many([(state, 13) for state in states])
    assert caught.value.code == "capacity.pages"
    assert strategy.ledger.pool.references.tolist() == before
    strategy.check()
    kept = [reservation.commit() for reservation in strategy.reserve_many([(states[0], 13), (states[1], 13)])]
    assert [state.length for state in kept] == [33, 33]


def test_a_state_that_takes_part_twice_in_a_pass_has_rows_of_its_own_each_time() -> None:
    strategy = make_strategy()
    parent = start(strategy, range(20))
    reservations = strategy.reserve_many([(parent, 1), (parent, 1), (parent, 2)])
    for token, reservation in enumerate(reservations):
        write_rows(strategy, reservation, [token] * (reservation.stop - reservation.start))
    found = [read_state(reservation.commit()) for reservation in reservations]
    assert found == [state_bytes([*range(20), *tail]) for tail in ([0], [1], [2, 2])]


def test_a_state_that_is_being_appended_to_can_be_forked_meanwhile() -> None:
    strategy = make_strategy()
    parent = start(strategy, range(32))
    first, second = parent.reserve(3), parent.reserve(3)
    write_rows(strategy, first, [1, 1, 1])
    write_rows(strategy, second, [2, 2, 2])
    assert read_state(first.commit()) == state_bytes([*range(32), 1, 1, 1])
    assert read_state(second.commit()) == state_bytes([*range(32), 2, 2, 2])


def test_what_would_pass_the_context_is_refused_before_anything_is_leased() -> None:
    strategy = make_strategy(16, max_context=64)
    state = start(strategy, range(60))
    for call in (lambda: state.reserve(5), lambda: strategy.restore(65), lambda: state.reserve_branches([1, 5])):
        with pytest.raises(CapacityExceeded) as caught:
            call()
        assert caught.value.code == "capacity.context"
    assert strategy.stats()["pages_held"] == 4


def test_a_state_of_another_engine_is_refused() -> None:
    strategy, other = make_strategy(), make_strategy()
    mine, foreign = start(strategy, range(20)), start(other, range(20))
    with pytest.raises(InvalidInput) as caught:
        strategy.reserve_many([(mine, 1), (foreign, 1)])
    assert caught.value.code == "invalid_input.engine"
    strategy.check()
    other.check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_branches_have_pages_of_their_own_and_leave_nothing_behind(page_size: PageSize) -> None:
    strategy = make_strategy(page_size, num_tokens=4 * 2048)
    parent = start(strategy, range(20))
    before = strategy.ledger.pool.references.tolist()
    owner, branches = parent.reserve_branches([1, 3, 20])
    last = [branch.tables[0][-1] for branch in branches]
    assert len(set(last)) == 3
    for token, branch in enumerate(branches):
        write_rows(strategy, branch, [100 + token] * (branch.stop - branch.start))
    assert read_state(parent) == state_bytes(range(20))
    owner.abort()
    assert strategy.ledger.pool.references.tolist() == before
    strategy.check()


def test_how_many_branches_fit_is_known_before_they_are_reserved() -> None:
    strategy = make_strategy(16, num_tokens=128, max_context=128)
    parent = start(strategy, range(20))
    lengths = [1, 13, 1, 1, 1, 1]
    count = strategy.num_fitting_branches(parent, lengths)
    assert count == 5
    parent.reserve_branches(lengths[:count])[0].abort()
    with pytest.raises(CapacityExceeded):
        parent.reserve_branches(lengths[: count + 1])


def test_what_a_state_lacks_counts_when_its_branches_are_to_fit() -> None:
    strategy, shelf = make_strategy(16, num_tokens=512, max_context=512), ChunkShelf()
    state = start(strategy, range(256))
    shelf.commit(state, list(range(256)))
    strategy.evict()
    other = start(strategy, range(192))
    assert strategy.num_fitting_branches(state, [1] * 9) == 4
    state.reserve_branches([1] * 4)[0].abort()
    del other


def test_a_prefix_shares_the_table_and_keeps_it() -> None:
    strategy = make_strategy()
    whole = start(strategy, range(100))
    part = whole.prefix(30)
    del whole
    assert strategy.stats()["pages_held"] == 2
    assert read_state(part) == state_bytes(range(30))
    assert read_state(append(part, [5])) == state_bytes([*range(30), 5])


def test_a_read_holds_its_pages_though_their_state_dies_meanwhile() -> None:
    strategy = make_strategy(16, num_tokens=128, max_context=128)
    state = start(strategy, range(40))
    with strategy.ledger.reading(state.table, 0, 40) as pages:
        del state
        assert strategy.stats()["pages_held"] == 3
        other = start(strategy, range(80))
        assert not set(pages.tolist()) & set(other.table.pages.tolist())
    assert strategy.stats()["pages_held"] == 5


def test_threads_that_fork_read_and_append_disturb_nobody() -> None:
    strategy = make_strategy(16, num_tokens=1 << 15)
    parent = start(strategy, range(300))
    failures: list[str] = []

    def work(seed: int) -> None:
        state, tokens = parent.prefix(290 + seed), list(range(290 + seed))
        for round_number in range(30):
            added = [seed * 1000 + round_number] * 9
            state, tokens = append(state, added), tokens + added
            if read_state(state) != state_bytes(tokens):
                failures.append(f"thread {seed}, round {round_number}")

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch)
    assert not failures
    assert read_state(parent) == state_bytes(range(300))
    strategy.check()


@pytest.mark.parametrize(
    ("before", "start_at", "stop", "is_invariant", "want"),
    [
        (0, 0, 256, False, 256),
        (0, 0, 100, False, 0),
        (256, 256, 512, False, 512),
        (0, 200, 256, False, 0),
        (0, 200, 256, True, 256),
        (0, 0, 600, True, 512),
        (0, 256, 512, False, 0),
        (0, 256, 512, True, 0),
    ],
)
def test_only_chunks_with_the_bits_of_a_cold_start_count_as_prefilled(
    before: int, start_at: int, stop: int, is_invariant: bool, want: int
) -> None:
    assert count_prefilled(before, start_at, stop, is_invariant=is_invariant) == want
