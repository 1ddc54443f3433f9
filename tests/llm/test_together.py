"""Generating from several continuations in shared steps: each gets what it would have had alone."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.llm.conftest import Engines
from tests.llm.models import counted_rows, load, same_bits, some_tokens

from forkpoint.errors import InvalidInput
from forkpoint.llm import Sampling, TransformersEngine

pytestmark = pytest.mark.model

DRAWN = Sampling(temperature=0.9, seed=3, logit_bias=((1, -100.0),))


def test_lanes_share_a_step_and_give_what_each_gives_alone(engine: TransformersEngine) -> None:
    values = [
        engine.start(some_tokens(length, seed=length), sampling=replace(DRAWN, stream=length)) for length in (2, 9, 33)
    ]
    with counted_rows(engine) as rows:
        together = engine.generate_many(values, 5)
    assert rows == [3] * 5
    for value, found in zip(values, together, strict=True):
        alone = value.generate(5)
        assert found.completion == alone.completion
        assert same_bits(found.logits(), alone.logits())
        assert (found.receipt.tokens_computed, found.receipt.operation) == (5, "generate")


def test_more_values_than_lanes_are_served_as_lanes_become_free(
    engines: Engines, folders: object, model_cache: Path
) -> None:
    with load(folders("llama"), model_cache, lanes=2) as engine:  # type: ignore[operator]
        forks = engine.start(some_tokens(20), sampling=DRAWN).fork(5)
        with counted_rows(engine) as rows:
            found = engine.generate_many(forks, 4)
        assert max(rows) == 2
        assert sum(rows) == 5 * 4
        assert [value.tokens for value in found] == [fork.generate(4).tokens for fork in forks]


def test_a_value_that_ends_makes_room_and_the_others_go_on(engine: TransformersEngine) -> None:
    start = engine.start(some_tokens(10), sampling=Sampling(temperature=0.0, logit_bias=((1, -100.0),)))
    stopped = start.with_sampling(Sampling(temperature=0.0, logit_bias=((1, 100.0),)))
    ended, going = engine.generate_many([stopped, start], 6)
    assert (len(ended.completion.choices), ended.completion.finish_reason) == (1, "stop")  # type: ignore[union-attr]
    assert going.completion == start.generate(6).completion


def test_suffixes_are_computed_in_one_pass_from_one_base(engine: TransformersEngine) -> None:
    base = engine.start(some_tokens(30), sampling=DRAWN)
    suffixes: list[list[int]] = [some_tokens(3, seed=1), [], some_tokens(5, seed=2)]
    with counted_rows(engine) as rows:
        found = base.generate_many(suffixes, 4)
    assert rows == [3 + 5, *[3] * 4]
    for suffix, value in zip(suffixes, found, strict=True):
        alone = (base.extend(suffix) if suffix else base).generate(4)
        assert value.tokens == alone.tokens
        assert same_bits(value.logits(), alone.logits())
    assert base.generate_many([], 4) == []


def test_the_best_of_several_streams_is_the_one_of_the_highest_score(engine: TransformersEngine) -> None:
    base = engine.start(some_tokens(12), sampling=DRAWN)
    all_streams = [fork.generate(6) for fork in base.fork(4)]
    best = base.best_of(4, 6)
    means = [sum(choice.logprob for choice in value.completion.choices) / 6 for value in all_streams]  # type: ignore[union-attr]
    assert best.tokens == all_streams[means.index(max(means))].tokens
    by_last = base.best_of(4, 6, score=lambda value: value.tokens[-1])
    assert by_last.tokens[-1] == max(value.tokens[-1] for value in all_streams)
    with pytest.raises(InvalidInput) as refused:
        base.best_of(2, 6, sampling=Sampling(temperature=0.0))
    assert refused.value.code == "invalid_input.temperature"


def test_continuations_of_different_engines_are_refused(engine: TransformersEngine, engines: Engines) -> None:
    other = engines("qwen2").start(some_tokens(4))
    for values in ([other], [engine.start(some_tokens(4)), other]):
        with pytest.raises(InvalidInput) as refused:
            engine.generate_many(values, 2)
        assert refused.value.code == "invalid_input.engine"


def test_hundreds_of_candidates_are_scored_in_shared_passes(engine: TransformersEngine) -> None:
    base = engine.start(some_tokens(40))
    candidates = [some_tokens(1 + index % 4, seed=index) for index in range(200)]
    with counted_rows(engine) as rows:
        scores = base.score(candidates)
    assert len(rows) <= 4
    assert scores[17] == base.score([candidates[17]])[0]
    assert scores[199] == base.score([candidates[199]])[0]


def test_a_thousand_unwritten_forks_add_at_most_2_kib_each_and_no_page(engine: TransformersEngine) -> None:
    base = engine.start(some_tokens(1500))
    gc.collect()  # what earlier tests left would go meanwhile
    before = engine.stats()
    forks = base.fork(1000)
    assert engine.stats() == before
    fork = forks[17]
    own = [fork, fork.receipt, fork.sampling, fork._lineage, fork.receipt.notes, fork.messages]
    assert sum(map(sys.getsizeof, own)) <= 2048
    assert fork._cursor is base._cursor


def test_what_is_let_go_of_frees_its_pages(engine: TransformersEngine) -> None:
    gc.collect()
    before = engine.stats()["pages_held"]
    base = engine.start(some_tokens(100))
    forks = [fork.extend(some_tokens(40, seed=seed)) for seed, fork in enumerate(base.fork(6))]
    assert engine.stats()["pages_held"] > before
    del forks, base
    gc.collect()
    assert engine.stats()["pages_held"] == before
    engine._open().strategy.check()


def test_a_text_alone_is_not_taken_for_a_list_and_no_number_for_a_count(engine: TransformersEngine) -> None:
    base = engine.start(some_tokens(5))
    with pytest.raises(InvalidInput) as refused:
        base.generate_many("ab", 1)
    assert refused.value.code == "invalid_input.list"
    for count in (0, True, None):
        with pytest.raises(InvalidInput) as refused:
            base.best_of(count, 1, sampling=DRAWN)  # type: ignore[arg-type]
        assert refused.value.code == "invalid_input.count"
