"""How continuations live in memory and are served: what is refused at load, budgets, plans, use after close, racing threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from tests.llm.conftest import Engines, Folders
from tests.llm.models import counted_rows, load, runtime_of, some_tokens

from forkpoint.errors import CapacityExceeded, Error, InvalidInput
from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

TOKEN_BYTES: Final = 3 * 2 * (16 + 16) * 4
"""Of the tiny Llama in float32."""

ENDLESS: Final = Sampling(temperature=0.7, seed=5, logit_bias=((1, -100.0),))

# -- what is refused at load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"cache": "ring"}, "cache"),
        ({"cache": ""}, "cache"),
        ({"page_tokens": 24}, "page_tokens"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 512}, "page_tokens"),
        ({"page_tokens": 16.0}, "page_tokens"),
        ({"page_tokens": True}, "page_tokens"),
        ({"lanes": 0}, "lanes"),
        ({"lanes": -1}, "lanes"),
        ({"lanes": 257}, "lanes"),
        ({"lanes": 2.0}, "lanes"),
        ({"lanes": True}, "lanes"),
        ({"plan": "x"}, "plan"),
        ({"pool_bytes": 0}, "pool_bytes"),
        ({"pool_bytes": -1}, "pool_bytes"),
        ({"pool_bytes": "much"}, "pool_bytes"),
        ({"pool_bytes": 2048 * TOKEN_BYTES - 1}, "pool_bytes"),
        ({"max_context": 700, "pool_bytes": 43 * 16 * TOKEN_BYTES}, "pool_bytes"),
        ({"max_context": 2049}, "max_context"),
        ({"max_context": "all"}, "max_context"),
        ({"max_context": 700.0}, "max_context"),
        ({"native": "no"}, "native"),
    ],
)
def test_a_residency_that_cannot_be_is_refused_by_name(
    folders: Folders, model_cache: Path, options: dict[str, Any], code: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(folders("llama"), model_cache, **options)
    assert refused.value.code == f"invalid_input.{code}"


def test_a_pool_that_no_machine_has_is_a_typed_error(folders: Folders, model_cache: Path) -> None:
    with pytest.raises(CapacityExceeded) as refused:
        load(folders("llama"), model_cache, pool_bytes=1 << 60)
    assert refused.value.code == "capacity.memory"


def refusal(attempt: Callable[[], object]) -> tuple[str, dict[str, Any], str]:
    """What an error says, without the error, whose traceback would hold on to states."""
    with pytest.raises(Error) as caught:
        attempt()
    return caught.value.code, dict(caught.value.data), caught.value.message


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "context", "pages"),
    [("paged", 700, 44), ("paged", 304, 19), ("contiguous", 2048, 1), ("contiguous", 512, 1)],
)
def test_a_pool_of_one_context_serves_one_context(
    folders: Folders, tmp_path: Path, cache: str, context: int, pages: int
) -> None:
    """Measured anew too: what other loads found is out of sight."""
    page_bytes = (16 if cache == "paged" else context) * TOKEN_BYTES
    with load(folders("llama"), tmp_path, cache=cache, max_context=context, pool_bytes=pages * page_bytes) as engine:
        assert engine.exactness.claim == "invariance"
        assert engine.stats()["pages"] == pages
        value = engine.start(some_tokens(context - 2), sampling=ENDLESS).generate(9)
        assert (value.position, value.completion.finish_reason) == (context, "length")  # type: ignore[union-attr]
        runtime_of(engine).strategy.check()


def test_a_full_pool_says_what_would_free_space_and_loses_nothing(folders: Folders, model_cache: Path) -> None:
    with load(folders("llama"), model_cache, max_context=320, pool_bytes=320 * TOKEN_BYTES) as engine:
        value = engine.start(some_tokens(290), sampling=ENDLESS)
        before, expected = engine.stats(), value.generate(3).tokens
        attempts: list[Callable[[], object]] = [
            lambda: engine.start(some_tokens(40)),
            lambda: engine.generate_many(value.fork(8), 30),
            lambda: value.generate_many([some_tokens(9), some_tokens(25)], 1),
        ]
        while attempts:
            code, data, message = refusal(attempts.pop())
            assert code == "capacity.pages"
            assert "let go of continuations" in message
            assert data["want"] > data["free"]
        runtime_of(engine).strategy.check()
        assert engine.stats()["pages_held"] == before["pages_held"]
        assert value.generate(3).tokens == expected
        del value
        assert engine.start(some_tokens(300)).position == 299


def test_what_only_garbage_refers_to_makes_room_before_a_full_pool_is_an_error(
    folders: Folders, model_cache: Path
) -> None:
    with load(folders("llama"), model_cache, max_context=320, pool_bytes=320 * TOKEN_BYTES) as engine:
        cycle: list[object] = [engine.start(some_tokens(290))]
        cycle.append(cycle)
        gc.disable()
        try:
            del cycle
            assert engine.stats()["pages_held"] >= 18
            assert engine.start(some_tokens(300)).position == 299
        finally:
            gc.enable()


def test_a_full_pool_evicts_what_is_durable(folders: Folders, model_cache: Path, repo: Repository) -> None:
    with load(folders("llama"), model_cache, max_context=320, pool_bytes=320 * TOKEN_BYTES) as engine:
        value = engine.start(some_tokens(290), sampling=ENDLESS)
        expected = value.generate(3).tokens
        value.commit(repo, "main")
        other = engine.start(some_tokens(200, seed=1))
        assert not value._cursor.state.is_resident
        del other
        assert value.generate(3).tokens == expected
        assert engine.stats()["chunks_refilled_ever"] == 1


# -- the decode plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_one_plan_serves_every_pass_or_each_has_its_own_and_no_bit_differs(
    folders: Folders, model_cache: Path, native: bool
) -> None:
    found = []
    for policy in ("once", "replan"):
        with load(folders("llama"), model_cache, plan=policy, native=native) as engine:
            engine.start([3, 4])
            before = engine.stats()
            values = engine.generate_many(engine.start(some_tokens(300), sampling=ENDLESS).fork(3), 4)
            after = engine.stats()
            found.append([(value.tokens, value.logits().tobytes()) for value in values])
            assert after["passes_served"] - before["passes_served"] == 2 + 4
            assert after["plans_built"] - before["plans_built"] == (0 if policy == "once" else 2 + 4)
    assert found[0] == found[1]


@pytest.mark.parametrize("lanes", [1, 3, 32])
def test_any_number_of_lanes_gives_the_same_bits(
    folders: Folders, model_cache: Path, engine: TransformersEngine, lanes: int
) -> None:
    expected = [value.generate(3) for value in engine.start(some_tokens(30), sampling=ENDLESS).fork(20)]
    with load(folders("llama"), model_cache, lanes=lanes) as other:
        with counted_rows(other) as rows:
            values = other.generate_many(other.start(some_tokens(30), sampling=ENDLESS).fork(20), 3)
        assert max(rows[1:]) == min(lanes, 20)
        assert [value.id for value in values] == [value.id for value in expected]
        assert other.report().lanes == lanes


# -- use after close, and what belongs to another engine --------------------------------------------------------------


def test_a_closed_engine_is_refused_and_what_it_made_goes_on(folders: Folders, model_cache: Path) -> None:
    engine = load(folders("llama"), model_cache)
    value, session = engine.start(some_tokens(20), sampling=ENDLESS), engine.decode_session()
    expected = [each.tokens for each in value.generate_many([[3], [4]], 3)]
    engine.close()
    for attempt in (
        lambda: engine.start([3]),
        lambda: engine.generate_many([value], 1),
        lambda: engine.report(),
        lambda: engine.stats(),
        lambda: engine.load_parameters({}),
        lambda: engine.exactness,
    ):
        with pytest.raises(InvalidInput) as refused:
            attempt()
        assert refused.value.code == "invalid_input.closed"
    assert [each.tokens for each in value.generate_many([[3], [4]], 3)] == expected
    session.close()
    with pytest.raises(InvalidInput) as refused:
        session.step(3)
    assert refused.value.code == "invalid_input.closed"


def test_a_state_of_another_engine_is_refused_by_the_runtime_itself(
    engine: TransformersEngine, engines: Engines
) -> None:
    other = engines("qwen2").start(some_tokens(20))
    runtime, state = runtime_of(engine), other._cursor.state
    for attempt in (
        lambda: runtime.step(state, 3),
        lambda: runtime.advance(state, [3, 4]),
        lambda: runtime.evaluate(state, [[3]]),
        lambda: runtime.step_many([(runtime.strategy.empty(), 3), (state, 3)]),
    ):
        with pytest.raises(InvalidInput) as refused:
            attempt()
        assert refused.value.code == "invalid_input.engine"
    runtime.strategy.check()


@pytest.mark.parametrize("token", [-1, 320, True, 2.0, "3", None])
def test_tokens_that_are_none_of_the_model_are_refused_everywhere(engine: TransformersEngine, token: Any) -> None:
    value = engine.start(some_tokens(20))
    gc.collect()
    before = engine.stats()["pages_held"]
    for attempt in (
        lambda: engine.start([3, token]),
        lambda: value.extend([token]),
        lambda: value.score([[3], [token]]),
        lambda: value.generate_many([[3], [token]], 2),
        lambda: engine.decode_session().step(token),
    ):
        assert refusal(attempt)[0] == "invalid_input.token"
    assert engine.stats()["pages_held"] == before


@pytest.mark.parametrize("count", [-1, True, 1.5])
def test_numbers_of_tokens_and_forks_that_mean_nothing_are_refused(engine: TransformersEngine, count: Any) -> None:
    value = engine.start(some_tokens(20), sampling=ENDLESS)
    attempts: list[tuple[Callable[[], object], str]] = [
        (lambda: value.generate_many([[3]], count), "max_tokens"),
        (lambda: engine.generate_many([value], count), "max_tokens"),
    ]
    if count is not True:
        attempts.append((lambda: value.best_of(count, 3), "count"))
    for attempt, code in attempts:
        with pytest.raises(InvalidInput) as refused:
            attempt()
        assert refused.value.code == f"invalid_input.{code}"


def test_contexts_end_together_as_they_end_alone(folders: Folders, model_cache: Path) -> None:
    with load(folders("llama"), model_cache, max_context=64) as engine:
        values = [engine.start(some_tokens(length), sampling=ENDLESS) for length in (60, 64, 10)]
        ended = engine.generate_many(values, 8)
        assert [value.position for value in ended] == [64, 64, 17]
        assert [value.tokens for value in ended] == [value.generate(8).tokens for value in values]
        before = engine.stats()["pages_held"]
        with pytest.raises(CapacityExceeded) as beyond:
            values[2].generate_many([[3], some_tokens(60)], 2)
        assert beyond.value.code == "capacity.context"
        assert engine.stats()["pages_held"] == before


# -- threads that race ------------------------------------------------------------------------------------------------


@pytest.fixture
def small(folders: Folders, model_cache: Path) -> Iterator[TransformersEngine]:
    """A pool of 1,024 tokens."""
    with load(folders("llama"), model_cache, max_context=1024, pool_bytes=1024 * TOKEN_BYTES) as engine:
        yield engine


def test_threads_that_race_on_a_small_pool_get_what_they_get_alone_or_are_told_it_is_full(
    small: TransformersEngine, engine: TransformersEngine, repo: Repository
) -> None:
    def work(on: TransformersEngine, number: int) -> list[tuple[tuple[int, ...], bytes]]:
        value = on.start(some_tokens(60 + 70 * (number % 4), seed=number % 4), sampling=ENDLESS)
        made: list[Continuation] = [
            *on.generate_many(value.fork(3), 4),
            *value.generate_many([[3], some_tokens(20)], 3),
        ]
        value.score([[5], [6, 7]])
        if on is small:
            value.commit(repo, f"branch{number}")
        return [(each.tokens, each.logits().tobytes()) for each in made]

    expected = [work(engine, number) for number in range(4)]
    barrier, full = threading.Barrier(4), []

    def race(number: int) -> None:
        barrier.wait()
        for _ in range(4):
            try:
                assert work(small, number) == expected[number % 4]
            except CapacityExceeded as error:
                full.append(error.code)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(race, range(4)))
    assert len(full) < 16
    runtime_of(small).strategy.check()
    assert work(small, 3) == expected[3]
