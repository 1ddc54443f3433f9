"""Generation: stopping, streaming, text, and that it can be interrupted anywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.llm.models import decoder_config, load, make_model, make_tokenizer, same_bits, some_tokens

from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.llm.choosing import choose, log_softmax64

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)
RECITED = "a日é\U0001f600z"
"""Its bytes are all different, so a model that maps each token to the next can recite it."""


@pytest.fixture(scope="module")
def reciter(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> TransformersEngine:
    """A model that says ``RECITED`` after ``a`` and then ends: its layers add nothing, its output layer knows what follows what."""
    folder = tmp_path_factory.mktemp("reciter")
    model, tokenizer = make_model(decoder_config("llama", tie_word_embeddings=False)), make_tokenizer()
    tokens = [tokenizer.convert_tokens_to_ids(piece) for piece in _bytes_as_tokens(RECITED)]
    assert len(set(tokens)) == len(tokens)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedded = model.model.embed_tokens.weight
        embedded.copy_(torch.nn.functional.normalize(torch.randn(embedded.shape, generator=_seeded()), dim=-1))
        model.lm_head.weight.zero_()
        for here, following in zip(tokens, [*tokens[1:], 1], strict=True):
            model.lm_head.weight[following] = embedded[here]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load(folder, model_cache)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _bytes_as_tokens(text: str) -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[byte] for byte in text.encode()]


def first(reciter: TransformersEngine) -> Continuation:
    return reciter.start([reciter.encode("a")[0]])


# -- text -------------------------------------------------------------------------------------------------------------


def test_characters_of_several_tokens_come_whole_and_never_as_replacement_characters(
    reciter: TransformersEngine,
) -> None:
    pieces: list[str] = []
    done = first(reciter).generate(40, on_text=pieces.append)
    assert done.completion is not None
    assert done.completion.text == "".join(pieces) == RECITED[1:]
    assert done.completion.finish_reason == "stop"
    assert len(done.completion.choices) == len(RECITED.encode())  # one for each byte after the first, and the end
    assert done.pending == 1
    assert all("\ufffd" not in item.text for item in first(reciter).stream(40))
    assert "".join(item.text for item in first(reciter).stream(40)) == done.completion.text


@pytest.mark.parametrize("count", range(12))
def test_a_limit_inside_a_character_shows_no_part_of_it_and_going_on_shows_it_whole(
    reciter: TransformersEngine, count: int
) -> None:
    part = first(reciter).generate(count)
    rest = part.generate(40)
    assert part.completion is not None
    assert rest.completion is not None
    assert part.completion.text == RECITED[1:].encode()[:count].decode("utf-8", "ignore")
    assert part.completion.text + rest.completion.text == RECITED[1:]
    assert rest.completion.text == "".join(item.text for item in part.stream(40))


@pytest.mark.parametrize("count", range(1, 12))
def test_the_text_of_an_interrupted_stream_and_of_what_goes_on_from_it_join_to_the_whole(
    reciter: TransformersEngine, count: int
) -> None:
    taken = list(itertools.islice(first(reciter).stream(40), count))
    following = list(taken[-1].continuation.stream(40))
    assert "".join(item.text for item in (*taken, *following)) == RECITED[1:]
    if not following:
        return
    (last,) = itertools.islice(following, 1)
    assert last.continuation.tokens[: 1 + count] == taken[-1].continuation.tokens


@pytest.mark.parametrize("seed", range(3))
def test_the_texts_of_calls_that_go_on_from_one_another_join_to_the_text_of_one_call(
    engine: TransformersEngine, seed: int
) -> None:
    value = engine.start(some_tokens(9), sampling=Sampling(temperature=0.7, seed=seed, logit_bias=ENDLESS))
    whole = value.generate(12).completion
    assert whole is not None
    for cut in range(13):
        part = value.generate(cut)
        rest = part.generate(12 - cut)
        assert part.completion is not None
        assert rest.completion is not None
        assert part.completion.text + rest.completion.text == whole.text


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_text_join_to_the_completion_whatever_tokens_come(engine: TransformersEngine, seed: int) -> None:
    pieces: list[str] = []
    sampling = Sampling(temperature=1.2, seed=seed, logit_bias=ENDLESS)
    value = engine.start(some_tokens(9))
    done = value.generate(25, sampling=sampling, on_text=pieces.append)
    assert done.completion is not None
    assert "".join(pieces) == done.completion.text
    assert "".join(item.text for item in value.stream(25, sampling=sampling)) == done.completion.text


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["日", "é", "\U0001f600", "é\U0001f600", "日é\U0001f600z"])
def test_text_ends_before_a_stop_string_whose_tokens_stay_in_the_history(
    reciter: TransformersEngine, stop: str
) -> None:
    done = first(reciter).generate(40, sampling=Sampling(stop=("nowhere", stop)))
    assert done.completion is not None
    assert done.completion.text == RECITED[1:].split(stop)[0]
    assert done.completion.finish_reason == "stop"
    assert done.text == RECITED[: RECITED.index(stop)] + stop
    assert done.generate(5).tokens == done.tokens


def test_a_stop_string_may_begin_before_a_pause_and_end_after_it(reciter: TransformersEngine) -> None:
    sampling = Sampling(stop=("日é\U0001f600",))
    whole = first(reciter).generate(40, sampling=sampling)
    for count in range(1, 10):
        part = first(reciter).generate(count, sampling=sampling)
        rest = part.generate(40)
        assert rest.tokens == whole.tokens
        assert rest.completion is not None
        assert rest.completion.finish_reason == "stop"
        assert rest.completion.text == ""


def test_the_reasons_to_finish_are_told_apart(reciter: TransformersEngine) -> None:
    value = first(reciter)
    assert value.completion is None
    for limit, reason in ((0, "length"), (3, "length"), (10, "length"), (11, "stop"), (40, "stop")):
        done = value.generate(limit)
        assert done.completion is not None
        assert (len(done.completion.choices), done.completion.finish_reason) == (min(limit, 11), reason)


def test_an_ended_value_generates_nothing_more_and_goes_on_when_extended(reciter: TransformersEngine) -> None:
    ended = first(reciter).generate(40)
    again = ended.generate(5)
    assert again.completion is not None
    assert (again.tokens, again.completion.choices, again.completion.finish_reason) == (ended.tokens, (), "stop")
    more = ended.extend([reciter.encode("a")[0]]).generate(40)
    assert more.completion is not None
    assert more.completion.text == RECITED[1:]


def test_a_prompt_that_ends_with_an_end_token_is_no_end(reciter: TransformersEngine) -> None:
    done = reciter.start([5, 1]).generate(2, sampling=Sampling(logit_bias=ENDLESS))
    assert done.completion is not None
    assert len(done.completion.choices) == 2


# -- logprobs ---------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_unmodified_distribution_best_first(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(12))
    sampling = Sampling(temperature=2.0, seed=1, presence_penalty=1.0, logit_bias=ENDLESS)
    done = value.generate(6, sampling=sampling, top_logprobs=5)
    assert done.completion is not None
    rows = [item.logits for item in value.stream(6, sampling=sampling) if item.logits is not None]
    for choice, best, row in zip(done.completion.choices, done.completion.top_logprobs, rows, strict=True):
        logprobs = log_softmax64(row)
        assert choice.logprob == logprobs[choice.token]
        order = np.argsort(-logprobs, kind="stable")[:5]
        assert [(item.token, item.logprob) for item in best] == [(token, logprobs[token]) for token in order]
    plain = value.generate(3)
    assert plain.completion is not None
    assert plain.completion.top_logprobs == ()


# -- interruption -----------------------------------------------------------------------------------------------------

BUSY = Sampling(
    temperature=0.8, seed=11, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, top_p=0.95,
    logit_bias=ENDLESS,
)  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(logit_bias=ENDLESS), BUSY])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_stream_interrupted_anywhere_goes_on_as_if_it_had_not_been(
    engines: object, dtype: str, sampling: Sampling
) -> None:
    value = engines("llama", dtype).start(some_tokens(250), sampling=sampling)  # type: ignore[operator]
    whole = [item for item in value.stream(12) if item.choice is not None]
    for cut, item in enumerate(whole, start=1):
        rest = [item for item in item.continuation.stream(12 - cut) if item.choice is not None]
        assert [item.choice for item in rest] == [item.choice for item in whole[cut:]]
        for left, right in zip(rest, whole[cut:], strict=True):
            assert left.logits is not None
            assert right.logits is not None
            assert same_bits(left.logits, right.logits)


def test_generating_in_two_calls_gives_what_one_call_gives(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(30), sampling=BUSY)
    whole = value.generate(14)
    for cut in range(15):
        assert value.generate(cut).generate(14 - cut).tokens == whole.tokens


def test_an_abandoned_stream_leaves_the_value_and_its_siblings_intact(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(30), sampling=BUSY)
    whole = value.generate(8).tokens
    stream = value.stream(8)
    next(stream)
    stream.close()
    assert value.generate(8).tokens == whole


def test_each_choice_is_the_one_for_its_absolute_position_and_for_what_was_generated_so_far(
    engines: object,
) -> None:
    """Also past a rollover: random numbers count from the first token ever, penalties see what the context holds."""
    for name, count in (("llama", 20), ("gpt2", 90)):
        prompt = some_tokens(30)
        value = engines(name).start(prompt, sampling=BUSY)  # type: ignore[operator]
        held, given = list(prompt), len(prompt)
        for number, item in enumerate(item for item in value.stream(count) if item.choice is not None):
            if name == "gpt2" and len(held) > 64:
                given = max(0, given - (len(held) - 32))
                held = held[-32:]
            assert item.logits is not None
            assert item.choice == choose(
                item.logits, history=held, prompt_length=given, position=len(prompt) + number, sampling=BUSY
            )
            assert item.choice is not None
            held.append(item.choice.token)
            assert item.continuation.tokens == tuple(held)
