"""Sessions: one token a step, and everything that a continuation can do from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.llm.models import CONTEXT, load, same_bits, some_tokens

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.llm import DecodeSession, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model


def stepped(engine: TransformersEngine, tokens: list[int]) -> DecodeSession:
    session = engine.decode_session()
    for token in tokens:
        session.step(token)
    return session


def test_a_step_processes_one_token_and_predicts_the_next(engine: TransformersEngine) -> None:
    session = engine.decode_session()
    assert (session.size, session.capacity, session.cache_kind, session.page_size) == (
        0,
        CONTEXT,
        "paged",
        16,
    )
    value = engine.start([5])
    assert same_bits(session.step(5), value.logits())
    assert (session.size, session.tokens) == (1, (5,))
    assert same_bits(session.step(6), value.extend([6]).logits())


def test_a_session_that_is_reset_is_as_new(engine: TransformersEngine) -> None:
    session = stepped(engine, some_tokens(20))
    session.reset()
    assert (session.size, session.tokens) == (0, ())
    assert same_bits(session.step(5), engine.decode_session().step(5))


def test_forks_of_a_session_go_their_own_ways_and_survive_each_others_end(engine: TransformersEngine) -> None:
    session = stepped(engine, some_tokens(20))
    first, second = session.fork(), session.fork()
    expected = [same_bits(stepped(engine, [*some_tokens(20), token]).step(9), fork_step) for token, fork_step in
                ((3, _two(first, 3)), (4, _two(second, 4)))]  # fmt: skip
    assert expected == [True, True]
    session.close()
    first.reset()
    assert second.tokens == (*some_tokens(20), 4, 9)
    assert same_bits(second.step(7), stepped(engine, [*some_tokens(20), 4, 9]).step(7))


def _two(session: DecodeSession, token: int) -> object:
    session.step(token)
    return session.step(9)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257])
def test_a_snapshot_goes_on_exactly_in_another_session(engine: TransformersEngine, count: int) -> None:
    session = stepped(engine, some_tokens(count))
    data = session.snapshot()
    assert len(data) == session.snapshot_size()
    other = engine.decode_session()
    other.restore(data)
    assert (other.size, other.tokens) == (count, session.tokens)
    for token in (5, 6, 7):
        assert same_bits(session.step(token), other.step(token))


def test_a_session_takes_the_snapshot_of_a_continuation_without_its_pending_token(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(30))
    session = engine.decode_session()
    session.restore(value.snapshot())
    assert session.tokens == value.tokens[:-1]
    assert same_bits(session.step(value.pending), value.logits())


def test_a_session_becomes_a_continuation_with_a_pending_token(engine: TransformersEngine, repo: Repository) -> None:
    session = stepped(engine, some_tokens(20))
    value = session.continuation(9, sampling=Sampling(temperature=0.5, seed=3))
    assert (value.tokens, value.pending, value.position) == ((*some_tokens(20), 9), 9, 20)
    logits = value.logits()
    assert same_bits(session.step(9), logits)
    session.step(4)
    assert same_bits(value.logits(), logits)
    value.commit(repo, "main")
    assert engine.checkout(repo, "main").sampling == Sampling(temperature=0.5, seed=3)
    with pytest.raises(InvalidInput):
        session.continuation(100_000)


def test_a_full_session_says_so_and_stays_usable(folders: Callable[[str], Path], model_cache: Path) -> None:
    session = stepped(load(folders("llama"), model_cache, max_context=12), some_tokens(12))
    with pytest.raises(CapacityExceeded) as caught:
        session.step(3)
    assert caught.value.code == "capacity.context"
    assert session.size == 12
    session.reset()
    session.step(3)


def test_wrong_tokens_are_refused(engine: TransformersEngine) -> None:
    session = stepped(engine, [3])
    for token in (-1, 320, True, 1.5):
        with pytest.raises(InvalidInput) as caught:
            session.step(token)  # type: ignore[arg-type]
        assert caught.value.code == "invalid_input.token"
    assert session.size == 1


def test_a_closed_session_refuses_everything_but_being_closed(engine: TransformersEngine) -> None:
    with stepped(engine, [3, 4]) as session:
        assert session.size == 2
    session.close()
    for attempt in (
        lambda: session.step(3),
        lambda: session.fork(),
        lambda: session.snapshot(),
        lambda: session.snapshot_size(),
        lambda: session.restore(b""),
        lambda: session.reset(),
        lambda: session.continuation(3),
        lambda: session.capacity,
    ):
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert caught.value.code == "invalid_input.closed"
