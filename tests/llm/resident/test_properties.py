"""A state machine over the pool: whatever is done to many states, each holds the rows of its own tokens and every page is accounted for.

The model is a list of tokens for each state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from tests.llm.resident.rows import (
    GROUPS,
    ChunkShelf,
    encoded_chunk,
    make_strategy,
    read_state,
    state_bytes,
    write_rows,
)

from forkpoint.errors import CapacityExceeded
from forkpoint.llm.resident.paged import PagedState, PagedStrategy
from forkpoint.llm.resident.pages import PageSize
from forkpoint.state.prefix import CHUNK_TOKENS

LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 64, 100, 255, 256, 257, 300])
CONTEXT = 768


@dataclass
class Held:
    """A live state and the tokens it must hold."""

    state: PagedState
    tokens: list[int]


class Pages(RuleBasedStateMachine):
    held: Bundle[Held] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Held] = []
        self.next_token = 0
        self.shelf = ChunkShelf()

    @initialize(page_size=st.sampled_from([16, 64, 256, "contiguous"]), num_contexts=st.sampled_from([1, 2, 5]))
    def begin(self, page_size: PageSize, num_contexts: int) -> None:
        self.strategy: PagedStrategy = make_strategy(page_size, num_tokens=CONTEXT * num_contexts, max_context=CONTEXT)

    @rule(target=held)
    def start(self) -> Held:
        return self._hold(self.strategy.empty(), [])

    @rule(target=held, base=held, length=LENGTHS)
    def append(self, base: Held, length: int) -> object:
        return self._append_many([(base, length)])

    @rule(target=held, bases=st.lists(held, min_size=2, max_size=4), length=LENGTHS)
    def append_to_several(self, bases: list[Held], length: int) -> object:
        return self._append_many([(base, length + place) for place, base in enumerate(bases)])

    @rule(target=held, base=consumes(held), length=LENGTHS)
    def grow(self, base: Held, length: int) -> object:
        grown = self._append_many([(base, length)])
        self._free(base)
        return grown

    @rule(target=held, base=held, share=st.floats(0, 1))
    def prefix(self, base: Held, share: float) -> Held:
        length = int(len(base.tokens) * share)
        return self._hold(base.state.prefix(length), base.tokens[:length])

    @rule(base=held, length=LENGTHS, is_dropped=st.booleans())
    def abort(self, base: Held, length: int, is_dropped: bool) -> None:
        try:
            reservation = base.state.reserve(length)
        except CapacityExceeded as error:
            return self._expect_full(error)
        write_rows(self.strategy, reservation, self._new_tokens(length))
        if not is_dropped:
            reservation.abort()

    @rule(base=held, lengths=st.lists(LENGTHS, min_size=1, max_size=4))
    def branch(self, base: Held, lengths: list[int]) -> None:
        try:
            owner, branches = base.state.reserve_branches(lengths)
        except CapacityExceeded as error:
            return self._expect_full(error)
        for branch, length in zip(branches, lengths, strict=True):
            write_rows(self.strategy, branch, self._new_tokens(length))
        owner.abort()

    @rule(base=held)
    def commit(self, base: Held) -> None:
        self.shelf.commit(base.state, base.tokens)

    @rule(num_pages=st.none() | st.integers(1, 20))
    def evict(self, num_pages: int | None) -> None:
        self.strategy.evict(num_pages)

    @rule(target=held, base=held, fails=st.booleans())
    def restore(self, base: Held, fails: bool) -> object:
        try:
            restoration = self.shelf.restore(self.strategy, base.tokens)
        except CapacityExceeded as error:
            self._expect_full(error)
            return multiple()
        if fails:
            restoration.abort()
            return multiple()
        return self._hold(restoration.finish(prefilled=0), list(base.tokens))

    @rule(base=consumes(held))
    def free(self, base: Held) -> None:
        self._free(base)

    @invariant()
    def every_state_holds_its_own_rows(self) -> None:
        for each in self.live:
            assert read_state(each.state) == state_bytes(each.tokens)

    @invariant()
    def every_chunk_that_is_known_holds_the_tokens_of_its_state(self) -> None:
        for each in self.live:
            for group, index in itertools.product(range(len(GROUPS)), range(each.state.length // CHUNK_TOKENS)):
                ref = each.state.chunk_ref(group, index)
                inside = each.tokens[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS]
                assert ref is None or self.shelf.chunks[ref.chunk_id] == encoded_chunk(
                    group, index * CHUNK_TOKENS, inside
                )

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "strategy"):
            self.strategy.check()

    def teardown(self) -> None:
        for each in self.live:
            del each.state
        self.live.clear()
        if hasattr(self, "strategy"):
            self.strategy.check()
            stats = self.strategy.stats()
            assert (stats["lineages"], stats["pages_free"]) == (0, stats["pages"])

    def _append_many(self, wanted: Sequence[tuple[Held, int]]) -> object:
        try:
            reservations = self.strategy.reserve_many([(base.state, length) for base, length in wanted])
        except CapacityExceeded as error:
            self._expect_full(error)
            return multiple()
        added = [self._new_tokens(length) for _, length in wanted]
        for reservation, tokens in zip(reservations, added, strict=True):
            write_rows(self.strategy, reservation, tokens)
        return multiple(
            *(
                self._hold(reservation.commit(), base.tokens + tokens)
                for reservation, (base, _), tokens in zip(reservations, wanted, added, strict=True)
            )
        )

    def _expect_full(self, error: CapacityExceeded) -> None:
        assert error.code in ("capacity.pages", "capacity.context")
        if error.code == "capacity.pages":
            assert error.data["want"] > error.data["free"] + error.data["evictable"]  # type: ignore[operator]

    def _new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def _hold(self, state: PagedState, tokens: list[int]) -> Held:
        self.live.append(Held(state, tokens))
        return self.live[-1]

    def _free(self, base: Held) -> None:
        self.live.remove(base)
        del base.state


def test_any_interleaving_of_operations_gives_each_state_its_own_rows_and_loses_no_page() -> None:
    run_state_machine_as_test(Pages, settings=settings(stateful_step_count=30))


@pytest.mark.full
def test_long_interleavings_do_as_well() -> None:
    run_state_machine_as_test(Pages, settings=settings(max_examples=300, stateful_step_count=120))
