"""Scoring whole texts: against steps, independent of the other candidates, and without touching the state."""

from __future__ import annotations

import random

import pytest
from tests.llm.models import CONTEXT, counted_rows, save_model, some_tokens

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.llm import TransformersEngine
from forkpoint.llm.choosing import log_softmax64

pytestmark = pytest.mark.model

DTYPES = ("float32", "bfloat16", "float16")


def candidates(count: int, seed: int) -> list[list[int]]:
    lengths = random.Random(seed)
    return [some_tokens(lengths.choice([1, 2, 3, 4, 5, 9, 20, 40]), seed=seed + number) for number in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 20, 255, 300])
def test_scores_equal_log_probabilities_step_by_step(engines: object, dtype: str, length: int) -> None:
    engine: TransformersEngine = engines("llama", dtype)  # type: ignore[operator]
    value = engine.start(some_tokens(length))
    for score, tokens in zip(value.score(candidates(5, 1)), candidates(5, 1), strict=True):
        assert score.tokens == tuple(tokens)
        assert score.total == pytest.approx(sum(score.logprobs))
        here = value
        for token, logprob in zip(tokens, score.logprobs, strict=True):
            assert logprob == log_softmax64(here.logits())[token]
            here = here.extend([token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "gpt_oss"])
def test_a_score_is_independent_of_the_other_candidates_bit_for_bit(engines: object, name: str, dtype: str) -> None:
    engine: TransformersEngine = engines(name, dtype)  # type: ignore[operator]
    value = engine.start(some_tokens(20))
    texts = [text for text in candidates(14, 3) if len(text) <= 40]
    together = value.score(texts)
    assert together == [value.score([text])[0] for text in texts]
    assert together[::-1] == value.score(texts[::-1])


def test_one_next_token_scores_as_the_logits_say(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(50))
    logprobs = log_softmax64(value.logits())
    for token, score in enumerate(value.score([[token] for token in range(30)])):
        assert score.logprobs == (logprobs[token],)


def test_scoring_leaves_the_state_untouched(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(255))
    grown = value.extend([3, 4, 5])
    before = [(one.id, one.logits().tobytes()) for one in (value, grown)]
    value.score(candidates(6, 5))
    grown.score(candidates(6, 6))
    fresh = engine.start(some_tokens(255))
    assert [(one.id, one.logits().tobytes()) for one in (value, grown)] == before
    assert (fresh.id, fresh.logits().tobytes()) == before[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates_share_passes_of_at_most_256_rows(engines: object, dtype: str) -> None:
    engine: TransformersEngine = engines("llama", dtype)  # type: ignore[operator]
    value = engine.start(some_tokens(30))
    texts = [some_tokens(30, seed=number) for number in range(10)]
    value.score(texts)
    with counted_rows(engine) as rows:
        value.score(texts)
    assert rows == [240, 60]


def test_options_count_the_end_and_normalise(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(30))
    plain, ended = value.score([[5, 6]])[0], value.score([[5, 6]], end="count")[0]
    assert ended.tokens == (5, 6, 1)
    assert ended.logprobs[:2] == pytest.approx(plain.logprobs, abs=1e-4)
    assert ended.logprobs[2] == pytest.approx(log_softmax64(value.extend([5, 6]).logits())[1], abs=1e-4)
    mean = value.score([[5, 6]], normalise="tokens")[0]
    assert mean.logprobs == plain.logprobs
    assert mean.total == plain.total / 2
    assert value.score(["the door"])[0].tokens == tuple(engine.encode("the door"))
    assert value.score([]) == []


def test_wrong_candidates_and_options_are_refused(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(30))
    for attempt, code in (
        (lambda: value.score([[5], []]), "invalid_input.empty"),
        (lambda: value.score([""], end="count"), "invalid_input.empty"),
        (lambda: value.score([[5]], end="maybe"), "invalid_input.option"),  # type: ignore[arg-type]
        (lambda: value.score([[5]], normalise="bytes"), "invalid_input.option"),  # type: ignore[arg-type]
        (lambda: value.score([[5, 9999]]), "invalid_input.token"),
        (lambda: value.score("a text"), "invalid_input.list"),
        (lambda: value.score([[5], [9999]]), "invalid_input.token"),
    ):
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert caught.value.code == code


def test_a_candidate_past_the_context_is_refused_and_one_up_to_it_is_scored(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(CONTEXT - 9))
    assert len(value.score([some_tokens(10)])[0].logprobs) == 10
    with pytest.raises(CapacityExceeded) as caught:
        value.score([[5], some_tokens(11)])
    assert caught.value.code == "capacity.context"


def test_a_model_without_an_end_token_cannot_count_it(tmp_path: object, model_cache: object) -> None:
    from tests.llm.models import decoder_config, load

    folder = save_model(tmp_path / "endless", decoder_config("llama", eos_token_id=None))  # type: ignore[operator]
    with load(folder, model_cache) as engine, pytest.raises(InvalidInput) as caught:  # type: ignore[arg-type]
        engine.start([3, 4]).score([[5]], end="count")
    assert caught.value.code == "invalid_input.option"
