"""Appending is a transaction over all layers: a failure anywhere leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.llm.conftest import Engines, Folders
from tests.llm.models import held, load, model_of, runtime_of, same_bits, served_by, some_tokens

from forkpoint.errors import Corrupt, Incompatible, InvalidInput
from forkpoint.llm import Continuation, TransformersEngine
from forkpoint.llm.engines.base import Logits
from forkpoint.llm.engines.plain import plain_parameters

pytestmark = pytest.mark.model

Failing = Callable[[TransformersEngine, int], AbstractContextManager[None]]
"""(engine, after): passes of the engine past the first ``after`` raise ArithmeticError."""


def in_layer(layer: int) -> Failing:
    """The pass stops in a layer, those before it done; of an engine that runs through transformers."""

    @contextmanager
    def failing(engine: TransformersEngine, after: int) -> Iterator[None]:
        left = [after]

        def hook(*_: object) -> None:
            if not left[0]:
                raise ArithmeticError("injected")
            left[0] -= 1

        handle = model_of(engine).model.layers[layer].register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return failing


@contextmanager
def before_any_row(engine: TransformersEngine, after: int) -> Iterator[None]:
    """The pass does not even begin."""
    with served_by(engine, failing_serve(after, is_written=False)):
        yield


@contextmanager
def after_all_rows(engine: TransformersEngine, after: int) -> Iterator[None]:
    """Every row is written to its pages, then the pass fails."""
    with served_by(engine, failing_serve(after, is_written=True)):
        yield


def failing_serve(after: int, *, is_written: bool) -> Callable[..., Logits]:
    left = [after]

    def serve(run: Callable[..., Logits], step: Any, output_rows: Any, *, threads: int) -> Logits:
        logits = run(step, output_rows, threads=threads) if is_written or left[0] else None
        if not left[0]:
            raise ArithmeticError("injected")
        left[0] -= 1
        assert logits is not None
        return logits

    return serve


WAYS = {
    "in layer 0": (False, in_layer(0)),
    "in layer 1": (False, in_layer(1)),
    "in layer 2": (False, in_layer(2)),
    "before any row": (True, before_any_row),
    "after all rows": (True, after_all_rows),
}


@pytest.fixture(params=WAYS)
def case(request: pytest.FixtureRequest, engines: Engines) -> tuple[TransformersEngine, Failing]:
    """An engine, and a way in which its passes can fail."""
    native, failing = WAYS[request.param]
    return engines("llama", "float32", native), failing


def mark(value: Continuation) -> int:
    return int(value._cursor.state.table.mark)  # type: ignore[attr-defined]


def test_a_failing_pass_leaves_size_and_mark_and_later_results_unchanged(
    case: tuple[TransformersEngine, Failing],
) -> None:
    engine, failing = case
    value = engine.start(some_tokens(100))
    expected = engine.start(some_tokens(100)).extend([3, 4, 5])
    before = (value.tokens, mark(value), held(engine))
    for attempt in (
        lambda: value.extend([3, 4, 5]),
        lambda: value.generate(2),
        lambda: value.logits(),
        lambda: value.score([[3], [4, 5]]),
        lambda: next(value.stream(1)),
        lambda: value.generate_many([[3], [4, 5]], 2),
        lambda: engine.generate_many([value, value], 2),
    ):
        with failing(engine, 0), pytest.raises(ArithmeticError):
            attempt()
    assert (value.tokens, mark(value), held(engine)) == before
    runtime_of(engine).strategy.check()
    assert value.extend([3, 4, 5]).id == expected.id
    assert same_bits(value.extend([3, 4, 5]).logits(), expected.logits())


def test_a_failure_in_a_later_piece_of_a_long_append_leaves_the_value_usable(
    case: tuple[TransformersEngine, Failing],
) -> None:
    engine, failing = case
    value = engine.start(some_tokens(100))
    added = some_tokens(700, seed=1)
    expected = engine.start(some_tokens(100)).extend(added)
    for after in (0, 1, 2):
        with failing(engine, after), pytest.raises(ArithmeticError):
            value.extend(added)
        assert value.position == 99
    assert value.extend(added).id == expected.id
    assert value.id == engine.start(some_tokens(100)).id


def test_a_step_of_many_that_fails_keeps_nothing_of_any(case: tuple[TransformersEngine, Failing]) -> None:
    engine, failing = case
    values = [engine.start(some_tokens(length, seed=length)) for length in (3, 16, 40)]
    expected = [value.generate(4).tokens for value in values]
    before = (held(engine), [mark(value) for value in values])
    for after in (0, 2):
        with failing(engine, after), pytest.raises(ArithmeticError):
            engine.generate_many(values, 4)
    runtime_of(engine).strategy.check()
    assert (held(engine), [mark(value) for value in values]) == before
    assert [value.tokens for value in engine.generate_many(values, 4)] == expected


def test_a_session_whose_step_fails_stays_where_it_was(case: tuple[TransformersEngine, Failing]) -> None:
    engine, failing = case
    session, other = engine.decode_session(), engine.decode_session()
    for token in some_tokens(9):
        session.step(token)
        other.step(token)
    with failing(engine, 0), pytest.raises(ArithmeticError):
        session.step(7)
    assert (session.size, session.tokens) == (9, tuple(some_tokens(9)))
    assert same_bits(session.step(8), other.step(8))


def test_a_failed_prefill_leaves_no_memory_behind(case: tuple[TransformersEngine, Failing]) -> None:
    engine, failing = case
    before = held(engine)
    with failing(engine, 1), pytest.raises(ArithmeticError):
        engine.start(some_tokens(600))
    assert held(engine) == before


def test_a_pass_that_the_program_refuses_changes_nothing(engines: Engines) -> None:
    """The check of tokens is taken away, so that the refusal comes from native code."""
    engine = engines("llama", "bfloat16")
    assert engine.report().executor == "program"
    value = engine.start(some_tokens(30))
    expected, before = value.extend([3]).id, held(engine)
    runtime = runtime_of(engine)
    with pytest.raises(InvalidInput, match=re.escape("320")) as refused:
        runtime.run([(value._cursor.state, [5, 320])], output="last")
    assert refused.value.code == "invalid_input.pass"
    assert held(engine) == before
    assert value.extend([3]).id == expected


# -- logits that are no numbers ---------------------------------------------------------------------------------------


@contextmanager
def not_a_number(engine: TransformersEngine) -> Iterator[None]:
    """The model gives its logits, one of each row no number."""
    plan = runtime_of(engine).plan
    own = plan._executor

    def run(step: Any, output_rows: Any, *, threads: int) -> Logits:
        logits = own.run(step, output_rows, threads=threads)
        logits[:, 7] = np.nan
        return logits

    plan._executor = SimpleNamespace(name=own.name, run=run)  # type: ignore[assignment]
    try:
        yield
    finally:
        plan._executor = own


@pytest.mark.parametrize("native", [True, False])
def test_logits_that_are_no_numbers_are_a_typed_error_and_the_value_stays_usable(
    engines: Engines, native: bool
) -> None:
    engine = engines("llama", "float32", native)
    value, session = engine.start(some_tokens(30)), engine.decode_session()
    session.step(3)
    expected = value.generate(5).tokens
    before = held(engine)
    with not_a_number(engine):
        for attempt in (
            lambda: value.generate(3),
            lambda: next(value.stream(3)),
            lambda: value.logits(),
            lambda: value.score([[3]]),
            lambda: engine.generate_many([value, value], 3),
            lambda: value.generate_many([[3, 4], [5]], 3),
            lambda: value.best_of(1, 3),
            lambda: session.step(4),
        ):
            with pytest.raises(Corrupt) as caught:
                attempt()
            assert caught.value.code == "corrupt.logits"
    assert (held(engine), session.size) == (before, 1)
    runtime_of(engine).strategy.check()
    assert value.generate(5).tokens == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_give_no_numbers_are_refused_and_can_be_replaced_again(
    folders: Folders, model_cache: Path, dtype: str
) -> None:
    with load(folders("llama"), model_cache, dtype=dtype) as engine:
        name = "model.norm.weight"
        good = dict(plain_parameters(model_of(engine)))[name].clone()
        before = engine.fingerprint
        with pytest.raises(Corrupt) as caught:
            engine.load_parameters({name: torch.full((64,), torch.nan)})
        assert caught.value.code == "corrupt.logits"
        with pytest.raises(Incompatible, match="weights changed"):
            engine.start(some_tokens(3))
        engine.load_parameters({name: good})
        assert engine.fingerprint == before
        assert engine.start(some_tokens(30)).generate(2).position == 31


def test_an_interrupt_in_mid_pass_is_an_abort(engines: Engines) -> None:
    engine = engines("llama", "float32", False)
    value = engine.start(some_tokens(30))
    expected = engine.start(some_tokens(30)).extend([3]).id

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model_of(engine).model.layers[1].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            value.extend([3])
    finally:
        handle.remove()
    assert value.extend([3]).id == expected
