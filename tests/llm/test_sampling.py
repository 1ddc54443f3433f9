"""Choosing a token: against slow rules written here, and against values that must never change."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.llm.choosing import Choice, Logits, choose, log_softmax64, top_logprobs, uniform
from forkpoint.llm.sampling import Sampling

INFINITY = float("inf")
MASK = 2**64 - 1


def vector(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def token_of(logits: Logits, sampling: Sampling, *, history: tuple[int, ...] = (), prompt: int = 0, at: int = 0) -> int:
    return choose(logits, history=history, prompt_length=prompt, position=at, sampling=sampling).token


# -- slow rules -------------------------------------------------------------------------------------------------------


def philox_word(key: tuple[int, int], counter: tuple[int, int, int, int]) -> int:
    """First output word of Philox4x64-10, written from Salmon et al. 2011."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(c2 * 0xCA5A826395121157, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0


def slow_scores(logits: Logits, history: tuple[int, ...], prompt: int, sampling: Sampling) -> list[float]:
    scores = [float(logit) for logit in logits]
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(history):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    generated = history[prompt:]
    for token in set(generated):
        scores[token] -= generated.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return scores


def relative(pool: NDArray[np.float64], best: float, temperature: float) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return np.exp((pool - best) / temperature)


def slow_kept(scores: list[float], sampling: Sampling) -> list[int]:
    """Ids that may be drawn, by one full stable sort."""
    ranked = sorted(range(len(scores)), key=lambda token: -scores[token])
    ranked = ranked[: sampling.top_k or None]
    pool = np.array([scores[token] for token in ranked])
    weights = relative(pool, pool[0], sampling.temperature)
    if sampling.top_p < 1:
        cumulative = np.cumsum(weights)
        size = next(i for i, mass in enumerate(cumulative, 1) if mass >= sampling.top_p * cumulative[-1])
        ranked, weights = ranked[:size], weights[:size]
    return sorted(token for token, weight in zip(ranked, weights, strict=True) if weight >= sampling.min_p)


def slow_token(logits: Logits, history: tuple[int, ...], prompt: int, at: int, sampling: Sampling) -> int:
    scores = slow_scores(logits, history, prompt, sampling)
    if sampling.temperature == 0:
        return scores.index(max(scores))
    kept = slow_kept(scores, sampling)
    pool = np.array([scores[token] for token in kept])
    cumulative = np.cumsum(relative(pool, max(scores), sampling.temperature))
    target = (philox_word((sampling.seed, 0), (1, at, sampling.stream, 0)) >> 11) * 2.0**-53 * cumulative[-1]
    return next(token for token, mass in zip(kept, cumulative, strict=True) if mass > target)


# -- strategies -------------------------------------------------------------------------------------------------------

words = st.integers(0, MASK)
# Few distinct values make ties common; a banned token is -inf.
tied = st.lists(st.sampled_from([-INFINITY, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=40)
free = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=300)
logit_vectors = (tied | free).filter(lambda values: max(values) > -INFINITY).map(lambda values: vector(*values))


@st.composite
def samplings(draw: st.DrawFn, vocabulary: int = 2**31) -> Sampling:
    biases = draw(st.dictionaries(st.integers(0, vocabulary - 1), st.floats(-100, 100), max_size=4))
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 5e-324, 1e-3, 0.7, 1.0, 3.0, 1e6])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.1])),
        logit_bias=tuple(sorted(biases.items())),
        stop=tuple(draw(st.lists(st.text(min_size=1, max_size=5), max_size=2))),
        seed=draw(words),
        stream=draw(words),
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[Logits, tuple[int, ...], int, int, Sampling]:
    logits = draw(logit_vectors)
    history = tuple(draw(st.lists(st.integers(0, logits.size - 1), max_size=12)))
    prompt = draw(st.integers(0, len(history)))
    return logits, history, prompt, draw(words), draw(samplings(vocabulary=logits.size))


# -- the choice -------------------------------------------------------------------------------------------------------


@given(calls())
@settings(max_examples=600, deadline=None)
def test_every_choice_equals_the_rule_with_a_full_sort(
    call: tuple[Logits, tuple[int, ...], int, int, Sampling],
) -> None:
    logits, history, prompt, at, sampling = call
    before = logits.copy()
    choice = choose(logits, history=history, prompt_length=prompt, position=at, sampling=sampling)
    assert choice.token == slow_token(logits, history, prompt, at, sampling)
    assert choice.logprob == pytest.approx(float(log_softmax64(logits)[choice.token]), abs=1e-12)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize(
    "parameters", [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 1000, "top_p": 0.5, "min_p": 0.01}, {"min_p": 0.1}, {}]
)
def test_a_vocabulary_of_49152_gives_what_a_full_sort_gives(parameters: dict[str, Any]) -> None:
    generator = np.random.default_rng(7)
    logits = np.round(generator.standard_normal(49_152) * 3, 1).astype(np.float32)  # rounded: many ties
    for at in range(3):
        sampling = Sampling(temperature=0.9, seed=5, **parameters)
        assert token_of(logits, sampling, at=at) == slow_token(logits, (), 0, at, sampling)


@given(calls())
def test_a_history_array_and_a_history_tuple_give_the_same_choice(
    call: tuple[Logits, tuple[int, ...], int, int, Sampling],
) -> None:
    logits, history, prompt, at, sampling = call
    array = np.array(history, dtype=np.int32)
    first = choose(logits, history=history, prompt_length=prompt, position=at, sampling=sampling)
    assert choose(logits, history=array, prompt_length=prompt, position=at, sampling=sampling) == first


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert token_of(vector(0, 2, 1, 2), Sampling()) == 1


def test_exactly_top_k_tokens_stay_where_scores_tie() -> None:
    sampling = Sampling(temperature=1.0, top_k=2)
    drawn = {token_of(vector(1, 0, 1, 1, 1), sampling, at=at) for at in range(200)}
    assert drawn == {0, 2}


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.4])).astype(np.float32)
    drawn = {p: {token_of(logits, Sampling(temperature=1.0, top_p=p), at=at) for at in range(300)} for p in (0.4, 0.6)}
    assert drawn == {0.4: {1}, 0.6: {1, 2}}


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.3])).astype(np.float32)  # of the first two, 0.4 is 4/7 of the mass
    drawn = {token_of(logits, Sampling(temperature=1.0, top_k=2, top_p=0.55), at=at) for at in range(300)}
    assert drawn == {0}


def test_min_p_is_relative_to_the_best_token() -> None:
    logits = np.log(np.array([0.6, 0.29, 0.11])).astype(np.float32)
    drawn = {token_of(logits, Sampling(temperature=1.0, min_p=0.4), at=at) for at in range(300)}
    assert drawn == {0, 1}


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_scores_of_prompt_and_output() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert token_of(vector(3, 2, 1), sampling, history=(0,), prompt=1) == 1
    assert token_of(vector(-1, -1.5, -9), sampling, history=(0,), prompt=0) == 1


def test_presence_and_frequency_penalties_see_generated_tokens_only() -> None:
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 1.0}):
        sampling = Sampling(**penalty)
        assert token_of(vector(3, 1.5), sampling, history=(0, 0), prompt=2) == 0
        assert token_of(vector(3, 1.5), sampling, history=(0, 0), prompt=0) == 1
    assert token_of(vector(3, 1.5), Sampling(frequency_penalty=1.0), history=(0, 0), prompt=1) == 0


def test_the_bias_comes_before_the_repetition_penalty() -> None:
    sampling = Sampling(logit_bias=((0, 4.0),), repetition_penalty=2.0)
    assert (
        token_of(vector(-1, 2), sampling, history=(0,), prompt=1) == 1
    )  # (-1 + 4) / 2; -2 + 4 would have tied at id 0


def test_the_logprob_ignores_bias_penalties_and_temperature() -> None:
    sampling = Sampling(temperature=0.1, logit_bias=((2, 100.0),), repetition_penalty=1.5)
    choice = choose(vector(1, 2, 3), history=(0,), prompt_length=0, position=3, sampling=sampling)
    assert choice.token == 2
    assert choice.logprob == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)), abs=1e-15)


def test_logprobs_do_not_change_with_the_size_of_a_block() -> None:
    logits = np.random.default_rng(1).standard_normal(50_000).astype(np.float32)
    wide = logits.astype(np.longdouble)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert np.max(np.abs(log_softmax64(logits) - expected)) < 1e-13


@given(logit_vectors, st.integers(0, 400))
def test_top_logprobs_are_the_head_of_a_stable_sort(logits: Logits, k: int) -> None:
    logprobs = log_softmax64(logits)
    ranked = sorted(range(logits.size), key=lambda token: -logprobs[token])[:k]
    assert top_logprobs(logits, k) == tuple(Choice(token=t, logprob=float(logprobs[t])) for t in ranked)


# -- randomness -------------------------------------------------------------------------------------------------------

GOLDEN = {
    (0, 0, 0): "0x1.7a5d3204726c0p-7",
    (0, 0, 1): "0x1.b1e36aa7c0dd0p-3",
    (0, 1, 0): "0x1.498ac0ff6240dp-1",
    (1, 0, 0): "0x1.36da89edd58a0p-2",
    (42, 3, 4096): "0x1.3b2f32eea3620p-1",
    (MASK, MASK, MASK): "0x1.c3d8022001ffcp-2",
}


@pytest.mark.parametrize("place", GOLDEN)
def test_the_random_number_of_a_place_never_changes(place: tuple[int, int, int]) -> None:
    assert uniform(*place).hex() == GOLDEN[place]


@given(words, words, words)
def test_random_numbers_are_philox_as_its_paper_defines_it(seed: int, stream: int, position: int) -> None:
    assert uniform(seed, stream, position) == (philox_word((seed, 0), (1, position, stream, 0)) >> 11) * 2.0**-53


def test_a_generation_never_changes() -> None:
    logits = (np.arange(1000, dtype=np.float32) * 7 % 13) / 4
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=123, stream=2)
    history: tuple[int, ...] = (1, 2, 3)
    for _ in range(8):
        history += (token_of(logits, sampling, history=history, prompt=3, at=len(history)),)
    assert history[3:] == (102, 284, 128, 232, 180, 479, 375, 323)


def test_a_resumed_generation_draws_what_an_uninterrupted_one_draws() -> None:
    generator = np.random.default_rng(3)
    rows = generator.standard_normal((40, 500)).astype(np.float32) * 2
    sampling = Sampling(temperature=0.8, seed=9, repetition_penalty=1.2, frequency_penalty=0.2)
    whole: tuple[int, ...] = (1, 2)
    for row in rows:
        whole += (token_of(row, sampling, history=whole, prompt=2, at=len(whole)),)
    resumed, read = whole[:17], Sampling.from_record(json.loads(json.dumps(sampling.to_record())))
    for row in rows[15:]:
        resumed += (token_of(row, read, history=resumed, prompt=2, at=len(resumed)),)
    assert resumed == whole


def test_a_random_number_of_zero_draws_no_banned_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.llm.choosing.uniform", lambda *_: 0.0)  # no seed that gives it is known
    assert token_of(vector(-INFINITY, 0, 1), Sampling(temperature=1.0)) == 1


def test_twenty_thousand_draws_follow_the_softmax() -> None:
    logits = np.random.default_rng(11).standard_normal(20).astype(np.float32) * 1.5
    probabilities = np.exp(log_softmax64((logits / np.float32(0.5)).astype(np.float32)))
    draws = 20_000
    tokens = [token_of(logits, Sampling(temperature=0.5, seed=77), at=at) for at in range(draws)]
    counts = np.bincount(tokens, minlength=20)
    expected = draws * probabilities
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - probabilities)) + 1)


@pytest.mark.parametrize("axis", ["seed", "stream", "position"])
def test_neighbouring_seeds_streams_and_positions_are_uncorrelated(axis: str) -> None:
    base = {"seed": 5, "stream": 5, "position": 5}
    numbers = np.array([uniform(**{**base, axis: value}) for value in range(20_000)])
    assert abs(numbers.mean() - 0.5) < 5 * math.sqrt(1 / 12 / numbers.size)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(numbers.size)
    assert len(set(numbers)) == numbers.size


def test_seed_stream_and_position_are_not_interchangeable() -> None:
    numbers = {uniform(*place) for place in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]}
    assert len(numbers) == 6


# -- refusals ---------------------------------------------------------------------------------------------------------

NAN = float("nan")
WRONG: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, NAN, INFINITY, True, "1", None, 10**400)],
    *[("top_p", value) for value in (0.0, 1.1, NAN, False, -1)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("repetition_penalty", value) for value in (0.0, -1.0, NAN, INFINITY, True)],
    *[("presence_penalty", value) for value in (2.1, -2.1, NAN)],
    *[("frequency_penalty", value) for value in (2.1, -2.1, NAN)],
    *[("top_k", value) for value in (-1, 1.0, True, 2**31)],
    *[("seed", value) for value in (-1, 2**64, 0.0, True, None)],
    *[("stream", value) for value in (-1, 2**64, False)],
    *[("stop", value) for value in ("end", ["end"])],
    *[("logit_bias", value) for value in ({1: 1.0}, ((2, 0.0), (1, 0.0)), ((1, 0.0), (1, 0.0)), ((1,),), (1,))],
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Sampling(**{field: value})
    assert caught.value.code == "invalid_input.sampling"
    assert caught.value.data == {"field": field, "value": repr(value)}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("stop", ("a", ""), ("stop", "''")),
        ("stop", (1,), ("stop", "1")),
        ("stop", ("\ud800",), ("stop", "'\\ud800'")),
        ("logit_bias", ((-1, 0.0),), ("logit_bias token", "-1")),
        ("logit_bias", ((True, 0.0),), ("logit_bias token", "True")),
        ("logit_bias", ((0, NAN),), ("logit_bias", "nan")),
        ("logit_bias", ((0, 101.0),), ("logit_bias", "101.0")),
    ],
)
def test_a_wrong_part_of_a_field_is_refused_by_its_own_value(field: str, value: Any, named: tuple[str, str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Sampling(**{field: value})
    assert (caught.value.data["field"], caught.value.data["value"]) == named


@pytest.mark.parametrize("values", [(NAN, 1.0), (1.0, NAN), (-INFINITY, -INFINITY), (0.0, INFINITY)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_corrupt_and_name_the_position(values: tuple[float, ...], temperature: float) -> None:
    with pytest.raises(Corrupt) as caught:
        token_of(vector(*values), Sampling(temperature=temperature), at=31)
    assert caught.value.code == "corrupt.logits"
    assert caught.value.data["position"] == 31
    with pytest.raises(Corrupt):
        log_softmax64(vector(*values))


@pytest.mark.parametrize("logits", [np.zeros(3), np.zeros((1, 3), np.float32), np.zeros(0, np.float32)])
def test_logits_of_another_type_or_shape_are_refused(logits: Any) -> None:
    with pytest.raises(InvalidInput, match="float32 vector"):
        token_of(logits, Sampling())


@pytest.mark.parametrize(
    "call",
    [
        {"history": (3,), "sampling": Sampling(repetition_penalty=1.1)},
        {"history": (-1,), "sampling": Sampling(presence_penalty=1.0)},
        {"sampling": Sampling(logit_bias=((3, 1.0),))},
        {"prompt_length": 1},
        {"prompt_length": -1},
        {"position": -1},
        {"position": 2**64},
    ],
)
def test_an_argument_outside_the_vocabulary_or_its_range_is_refused(call: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        choose(vector(0, 1, 2), **{"history": (), "prompt_length": 0, "position": 0, "sampling": Sampling(), **call})


# -- records ----------------------------------------------------------------------------------------------------------


@given(samplings())
def test_a_sampling_survives_its_record_and_canonical_text(sampling: Sampling) -> None:
    record = sampling.to_record()
    assert Sampling.from_record(json.loads(json.dumps(record))) == sampling
    assert set(record) == {field.name for field in dataclasses.fields(Sampling)}
    assert "float" not in {type(value).__name__ for value in record.values()}


def test_equal_samplings_have_equal_records_whatever_they_were_written_as() -> None:
    one = Sampling(temperature=1, presence_penalty=-0.0, logit_bias=((3, -0.0),))
    two = Sampling(temperature=1.0, presence_penalty=0.0, logit_bias=((3, 0),))
    assert one.to_record() == two.to_record()


def test_the_record_form_never_changes() -> None:
    sampling = Sampling(temperature=0.8, top_k=3, logit_bias=((5, -1.5),), stop=("\n",), seed=MASK)
    assert sampling.to_record() == {
        "temperature": "0x1.999999999999ap-1",
        "top_k": 3,
        "top_p": "0x1.0000000000000p+0",
        "min_p": "0x0.0p+0",
        "repetition_penalty": "0x1.0000000000000p+0",
        "presence_penalty": "0x0.0p+0",
        "frequency_penalty": "0x0.0p+0",
        "logit_bias": [[5, "-0x1.8000000000000p+0"]],
        "stop": ["\n"],
        "seed": MASK,
        "stream": 0,
    }


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Sampling)])
def test_a_record_without_one_of_its_fields_is_refused_by_name(field: str) -> None:
    record = Sampling().to_record()
    del record[field]
    with pytest.raises(InvalidInput) as caught:
        Sampling.from_record(record)
    assert caught.value.data["field"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 1),
        ("temperature", 0.8),
        ("temperature", "0.8"),
        ("temperature", "nan"),
        ("temperature", "0x1p-1"),
        ("temperature", "-0x0.0p+0"),
        ("temperature", "0x1.0000000000000p+9999"),
        ("stop", "end"),
        ("stop", ("end",)),
        ("logit_bias", [[1, 2.0]]),
        ("logit_bias", [[1]]),
        ("logit_bias", {"1": "0x1.0000000000000p+0"}),
        ("seed", "0"),
    ],
)
def test_a_record_with_an_unknown_field_or_another_form_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Sampling.from_record({**Sampling().to_record(), field: value})
    assert caught.value.data["field"] == field


@given(words, st.integers(0, 5))
def test_another_stream_gives_another_sequence(seed: int, stream: int) -> None:
    assume(stream != 0)
    assert [uniform(seed, 0, at) for at in range(4)] != [uniform(seed, stream, at) for at in range(4)]
