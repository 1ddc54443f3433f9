"""Claim 3: equal tokens give equal bits however, wherever and beside whatever they were computed (cases C3, C9, C10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests.llm.conftest import Engines
from tests.llm.models import load, same_bits, some_tokens

from forkpoint.ids import ObjectId, digest_of
from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

DTYPES: Final = ("float32", "bfloat16", "float16")
ENDLESS: Final = Sampling(temperature=0.0, logit_bias=((0, -100.0), (1, -100.0), (2, -100.0)))
NUM_STEPS: Final = 6


def state_of(value: Continuation) -> ObjectId:
    """Digest of every key and value of a continuation."""
    state, parts = value._cursor.state, []
    for group in range(len(value._runtime.groups)):
        keys, values = state.slab_pieces(group, 0, state.length)
        parts += [*keys, *values]
    return digest_of(parts)


def outcome(value: Continuation) -> tuple[tuple[int, ...], bytes, ObjectId]:
    """What must not depend on how it came about: tokens, the next logits, the state."""
    return value.tokens, value.logits().tobytes(), state_of(value)


def prompts(engine: TransformersEngine, count: int) -> list[list[int]]:
    """Prompts of very different lengths, some over a chunk, several with the same beginning."""
    shared = some_tokens(270, seed=1)
    lengths = [3, 17, 40, 100, 256, 300]
    made = []
    for index in range(count):
        length = lengths[index % len(lengths)] + index // len(lengths)
        own = some_tokens(length, seed=index + 2)
        made.append([*shared, *own] if index % 3 == 2 else own)
    return made


def decoded(engine: TransformersEngine, tokens: list[int]) -> Continuation:
    """A continuation whose every token went through the model alone."""
    session = engine.decode_session()
    for token in tokens[:-1]:
        session.step(token)
    return session.continuation(tokens[-1], sampling=ENDLESS)


def check_all_ways(engine: TransformersEngine, repo: Repository, count: int) -> None:
    given = prompts(engine, count)
    cold = [engine.start(tokens, sampling=ENDLESS).generate(NUM_STEPS) for tokens in given]
    wanted = [outcome(value) for value in cold]
    for index, tokens in enumerate(given):
        start = engine.start(tokens, sampling=ENDLESS)
        start.commit(repo, f"b{index}")
        warm = engine.start(tokens, sampling=ENDLESS, repository=repo)
        assert warm.receipt.tokens_restored == (len(tokens) - 1) // 256 * 256
        ways = {
            "warm": warm,
            "restored": engine.checkout(repo, f"b{index}"),
            "forked": start.fork(),
            "decoded": decoded(engine, tokens),
            "in pieces": engine.start(tokens[:2], sampling=ENDLESS).extend(tokens[2:]) if len(tokens) > 2 else start,
        }
        for way, value in ways.items():
            assert outcome(value.generate(NUM_STEPS)) == wanted[index], (way, index)
    for first in range(0, count, 8):
        batch = [engine.start(tokens, sampling=ENDLESS) for tokens in given[first : first + 8]]
        for index, value in enumerate(engine.generate_many(batch, NUM_STEPS), start=first):
            assert outcome(value) == wanted[index], ("in a batch", index)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cold_warm_restored_forked_decoded_alone_and_in_a_batch_are_equal_bits(
    engines: Engines, repo: Repository, dtype: str
) -> None:
    engine = engines("llama", dtype)
    assert engine.exactness.claim == "invariance", engine.exactness.reasons
    check_all_ways(engine, repo, 6)


def test_the_real_model_gives_equal_bits_in_every_way(smollm2: TransformersEngine, repo: Repository) -> None:
    assert smollm2.exactness.claim == "invariance", smollm2.exactness.reasons
    check_all_ways(smollm2, repo, 2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_forty_prompts_of_the_real_model_give_equal_bits_in_every_way(dtype: str, repo: Repository) -> None:
    with load("bundled:smollm2", None, dtype=dtype, threads=2) as engine:
        check_all_ways(engine, repo, 40)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "mixtral"])
def test_a_state_and_its_logits_do_not_depend_on_pages_lanes_neighbours_or_pieces(
    folders: object, model_cache: Path, architecture: str, repo: Repository
) -> None:
    tokens = some_tokens(40, seed=5)
    found = []
    for options in (
        {"native": False},
        {"page_tokens": 16},
        {"page_tokens": 64},
        {"cache": "contiguous"},
        {"threads": 2},
    ):
        with load(folders(architecture), model_cache, **options) as engine:  # type: ignore[operator]
            assert engine.exactness.claim == "invariance", (options, engine.exactness.reasons)
            start = engine.start(tokens, sampling=ENDLESS)
            others = [engine.start(some_tokens(length, seed=length), sampling=ENDLESS) for length in (3, 20, 33)]
            value = engine.generate_many([others[0], start, *others[1:]], NUM_STEPS)[1]
            found.append((value.tokens, state_of(value), value.logits()))
    eager, *programs = found
    assert {(tokens, state, logits.tobytes()) for tokens, state, logits in programs} == {
        (programs[0][0], programs[0][1], programs[0][2].tobytes())
    }
    # The executor is part of the execution identity: a library's tanh over the logits may round otherwise than ours.
    assert eager[:2] == programs[0][:2]
    np.testing.assert_allclose(eager[2], programs[0][2], rtol=1e-6, atol=1e-6)


# ---- C9: forks in the middle of a page ----


@pytest.mark.parametrize("length", [5, 16, 23, 32, 255, 257])
def test_forks_in_mid_page_go_their_own_ways_and_leave_the_parent_alone(
    engine: TransformersEngine, length: int
) -> None:
    tokens = some_tokens(length, seed=9)
    parent = engine.start(tokens)
    before = outcome(parent)
    left, right = parent.fork(), parent.fork()
    ended = [left.extend(some_tokens(7, seed=1)), right.extend(some_tokens(9, seed=2))]
    alone = [engine.start([*tokens, *some_tokens(count, seed=seed)]) for count, seed in ((7, 1), (9, 2))]
    assert [outcome(value) for value in ended] == [outcome(value) for value in alone]
    kept = outcome(ended[1])
    del left, ended[0], alone
    assert outcome(parent) == before
    assert outcome(ended[0]) == kept
    engine._open().strategy.check()


# ---- C3: nobody's state is served to anybody else ----


@pytest.fixture
def small(folders: object, model_cache: Path) -> Iterator[TransformersEngine]:
    """An engine whose pool holds one context of 768 tokens."""
    one = 768 * 3 * 2 * 2 * 16 * 4
    with load(folders("llama"), model_cache, max_context=768, pool_bytes=one) as engine:  # type: ignore[operator]
        yield engine


def test_conversations_that_take_turns_in_a_small_pool_never_see_each_other(
    small: TransformersEngine, engine: TransformersEngine, repo: Repository
) -> None:
    needles = {name: some_tokens(300, seed=seed) for name, seed in (("a", 31), ("b", 32), ("c", 33))}
    values = {}
    for name, tokens in needles.items():
        values[name] = small.start(tokens, sampling=ENDLESS)
        values[name].commit(repo, name)
    assert small.stats()["chunks_evicted_ever"] > 0
    for turn in range(3):
        for name, tokens in needles.items():
            went_on = values[name].extend(some_tokens(4, seed=turn)).generate(3)
            alone = engine.start(tokens, sampling=ENDLESS).extend(some_tokens(4, seed=turn)).generate(3)
            assert went_on.tokens == alone.tokens
            assert same_bits(went_on.logits(), alone.logits())
            assert went_on.receipt.tokens_computed == 3
            del went_on
    small._open().strategy.check()


def test_a_claim_is_measured_and_said_with_its_reason(engine: TransformersEngine) -> None:
    report = engine.report()
    assert report.exactness == engine.exactness
    assert report.are_threads_alike
    assert "in pieces" in " ".join(report.exactness.reasons)
    assert engine.start(some_tokens(3)).receipt.claim == "invariance"
