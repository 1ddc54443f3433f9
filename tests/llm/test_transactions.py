"""Appending is a transaction over all layers: a failure anywhere leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.llm.models import model_of, same_bits, some_tokens

from forkpoint.errors import Corrupt
from forkpoint.llm import TransformersEngine

pytestmark = pytest.mark.model


@contextmanager
def failing(engine: TransformersEngine, layer: int, *, after: int = 0) -> Iterator[None]:
    """The layer's first pass past ``after`` raises."""
    module = model_of(engine).model.layers[layer]
    left = [after]

    def hook(*_: object) -> None:
        if not left[0]:
            raise ArithmeticError("injected")
        left[0] -= 1

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def not_a_number(engine: TransformersEngine) -> Iterator[None]:
    """Logits come out as NaN."""
    handle = model_of(engine).lm_head.register_forward_hook(lambda _m, _i, out: torch.full_like(out, torch.nan))
    try:
        yield
    finally:
        handle.remove()


def mark(value: object) -> int:
    return int(value._cursor.state.buffer.mark)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failing_layer_leaves_size_and_mark_and_later_results_unchanged(
    engine: TransformersEngine, layer: int
) -> None:
    value = engine.start(some_tokens(100))
    expected = engine.start(some_tokens(100)).extend([3, 4, 5])
    before = (value.tokens, mark(value), engine.stats())
    for attempt in (
        lambda: value.extend([3, 4, 5]),
        lambda: value.generate(2),
        lambda: value.logits(),
        lambda: value.score([[3], [4, 5]]),
        lambda: next(value.stream(1)),
    ):
        with failing(engine, layer), pytest.raises(ArithmeticError):
            attempt()
    assert (value.tokens, mark(value), engine.stats()) == before
    assert value.extend([3, 4, 5]).id == expected.id
    assert same_bits(value.extend([3, 4, 5]).logits(), expected.logits())


def test_a_failure_in_a_later_piece_of_a_long_append_leaves_the_value_usable(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(100))
    added = some_tokens(700, seed=1)
    expected = engine.start(some_tokens(100)).extend(added)
    for after in (0, 1, 2):
        with failing(engine, 1, after=after), pytest.raises(ArithmeticError):
            value.extend(added)
        assert value.position == 99
    assert value.extend(added).id == expected.id
    assert value.id == engine.start(some_tokens(100)).id


def test_a_session_whose_step_fails_stays_where_it_was(engine: TransformersEngine) -> None:
    session, other = engine.decode_session(), engine.decode_session()
    for token in some_tokens(9):
        session.step(token)
        other.step(token)
    with failing(engine, 2), pytest.raises(ArithmeticError):
        session.step(7)
    assert (session.size, session.tokens) == (9, tuple(some_tokens(9)))
    assert same_bits(session.step(8), other.step(8))


def test_logits_that_are_no_numbers_are_a_typed_error_and_the_value_stays_usable(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(30))
    expected = engine.start(some_tokens(30)).generate(5).tokens
    with not_a_number(engine):
        for attempt in (lambda: value.generate(3), lambda: next(value.stream(3)), lambda: value.score([[3]])):
            with pytest.raises(Corrupt) as caught:
                attempt()
            assert caught.value.code == "corrupt.logits"
    assert value.generate(5).tokens == expected


def test_a_failed_prefill_leaves_no_memory_behind(engines: Callable[..., TransformersEngine]) -> None:
    engine = engines("qwen3")
    before = engine.stats()
    with failing(engine, 1, after=1), pytest.raises(ArithmeticError):
        engine.start(some_tokens(600))
    assert engine.stats() == before


def test_an_interrupt_in_mid_pass_is_an_abort(engine: TransformersEngine) -> None:
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
