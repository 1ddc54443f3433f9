"""Threads that race on one engine get what they get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.llm.models import some_tokens

from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)


def work(engine: TransformersEngine, number: int) -> tuple[object, ...]:
    sampling = Sampling(temperature=0.8, seed=number, logit_bias=ENDLESS)
    value = engine.start(some_tokens(40 + 80 * number, seed=number), sampling=sampling)
    one, two = value.generate(8), value.extend([3, 4]).generate(4)
    scores = value.score([[5, 6], [7], some_tokens(9)])
    session = engine.restore(value.snapshot()).generate(5)
    return one.tokens, two.tokens, scores, session.tokens, value.id, one.logits().tobytes()


def test_threads_that_start_generate_and_score_get_what_they_get_alone(engine: TransformersEngine) -> None:
    alone = [work(engine, number) for number in range(4)]
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda number: work(engine, number), range(4))) == alone


def test_threads_that_go_on_from_one_value_are_forks_of_it(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(250))
    expected = {token: engine.start(some_tokens(250)).extend([token, token]).id for token in range(2, 10)}
    barrier = threading.Barrier(4)

    def grow(token: int) -> tuple[int, str]:
        if token < 6:
            barrier.wait()
        return token, value.extend([token, token]).id

    with ThreadPoolExecutor(4) as pool:
        assert dict(pool.map(grow, range(2, 10))) == expected
    assert value.id == engine.start(some_tokens(250)).id


def test_threads_that_commit_to_branches_of_one_repository_each_have_theirs(
    engine: TransformersEngine, tmp_path: Path
) -> None:
    def commit(number: int) -> Continuation:
        value = engine.start(some_tokens(300, seed=number % 2))
        value.commit(repository, f"branch{number}")
        return value

    with Repository.create(tmp_path) as repository, ThreadPoolExecutor(4) as pool:
        values = list(pool.map(commit, range(6)))
        for number, value in enumerate(values):
            assert engine.checkout(repository, f"branch{number}").tokens == value.tokens
            assert repository.verify(f"branch{number}").num_chunks == 2


def test_a_pass_in_another_thread_does_not_see_the_first_ones_rows(
    engines: Callable[..., TransformersEngine],
) -> None:
    engine = engines("qwen3")
    long = [engine.start(some_tokens(600, seed=seed)).id for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda seed: engine.start(some_tokens(600, seed=seed)).id, range(2))) == long


def test_statistics_and_commits_beside_starts_and_forks_do_not_disturb_them(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.start(some_tokens(1500))
    expected = engine.start(some_tokens(1500)).extend([7]).logits().tobytes()
    is_over = threading.Event()

    def watch() -> int:
        num = 0
        while not is_over.is_set():
            num += engine.stats()["lineages"]
        return num

    def commit() -> None:
        for number in range(6):
            engine.start(some_tokens(600, seed=number)).commit(repo, f"branch{number}")
            value.commit(repo, "main")

    with ThreadPoolExecutor(3) as pool:
        watching, committing = pool.submit(watch), pool.submit(commit)
        try:
            forks = [value.extend([7]) for _ in range(30)]
            committing.result()
        finally:
            is_over.set()
        assert watching.result() > 0
    assert {fork.logits().tobytes() for fork in forks} == {expected}
