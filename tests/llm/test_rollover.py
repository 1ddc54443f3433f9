"""Learned positions: a full context keeps its newest half and replays it, exactly as written by hand on the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.llm.models import load, same_bits, some_tokens
from transformers import AutoModelForCausalLM

from forkpoint.llm import Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)
GREEDY = Sampling(logit_bias=ENDLESS)
DRAWN = Sampling(
    temperature=0.9, seed=5, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3, logit_bias=ENDLESS
)
CONTEXT, KEPT = 64, 32


def by_hand(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens and their logits, each from a fresh pass over what the context holds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    held, generated, rows = list(prompt), [], []
    for _ in range(count):
        if len(held) > CONTEXT:
            held = held[-KEPT:]
        with torch.inference_mode():
            row = model(torch.tensor([held])).logits[0, -1].numpy()
        rows.append(row)
        biased = row.copy()
        biased[1] -= 100
        generated.append(int(np.argmax(biased)))
        held.append(generated[-1])
    return generated, rows


@pytest.mark.parametrize("length", [1, 20, 63, 64, 65])
def test_generation_past_the_context_equals_a_replay_loop_on_the_plain_model(
    engines: Callable[..., TransformersEngine], folders: Callable[[str], Path], length: int
) -> None:
    prompt = some_tokens(length)
    expected, rows = by_hand(folders("gpt2"), prompt, 110)
    items = [item for item in engines("gpt2").start(prompt, sampling=GREEDY).stream(110) if item.choice is not None]
    assert [item.choice.token for item in items if item.choice is not None] == expected
    for item, row in zip(items, rows, strict=True):
        assert item.logits is not None
        np.testing.assert_allclose(item.logits, row, atol=1e-4)


def test_what_was_dropped_is_counted_and_the_history_is_what_remains(
    engines: Callable[..., TransformersEngine],
) -> None:
    value = engines("gpt2").start(some_tokens(60))
    done = value.generate(100, sampling=GREEDY)
    assert done.completion is not None
    assert len(done.completion.choices) == 100
    assert done.completion.dropped == 160 - len(done.tokens)
    assert done.completion.finish_reason == "length"
    assert done.tokens == tuple(choice.token for choice in done.completion.choices)[-len(done.tokens) :]
    assert done.position == len(done.tokens) - 1 <= CONTEXT
    assert value.generate(3, sampling=GREEDY).completion.dropped == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("cut", [3, 4, 5, 6, 36, 37, 38, 60])
def test_it_goes_on_exactly_after_a_checkout_before_at_and_after_a_rollover(
    engines: Callable[..., TransformersEngine], repo: Repository, cut: int
) -> None:
    engine = engines("gpt2")
    items = [item for item in engine.start(some_tokens(60), sampling=DRAWN).stream(70) if item.choice is not None]
    items[cut - 1].continuation.commit(repo, "main")
    restored = engine.checkout(repo, "main")
    rest = [item for item in restored.stream(70 - cut) if item.choice is not None]
    assert [item.choice for item in rest] == [item.choice for item in items[cut:]]
    assert all(
        same_bits(left.logits, right.logits)  # type: ignore[arg-type]
        for left, right in zip(rest, items[cut:], strict=True)
    )
    assert restored.generate(70 - cut).tokens == items[-1].continuation.tokens


def test_a_shorter_context_of_learned_positions_rolls_over_too(
    folders: Callable[[str], Path], model_cache: Path
) -> None:
    engine = load(folders("gpt2"), model_cache, max_context=16)
    done = engine.start(some_tokens(10)).generate(40, sampling=GREEDY)
    assert done.completion is not None
    assert len(done.completion.choices) == 40


def test_a_table_of_positions_with_an_offset_rolls_over(folders: Callable[[str], Path], model_cache: Path) -> None:
    engine = load(folders("opt"), model_cache, max_context=16)
    assert len(engine.start(some_tokens(10)).generate(20, sampling=GREEDY).tokens) < 18


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt_oss"])
def test_rotary_models_end_with_their_context(folders: Callable[[str], Path], model_cache: Path, name: str) -> None:
    engine = load(folders(name), model_cache, max_context=40)
    done = engine.start(some_tokens(35)).generate(40, sampling=GREEDY)
    assert done.completion is not None
    assert (done.completion.finish_reason, len(done.completion.choices), done.completion.dropped) == ("length", 6, 0)
    assert done.position == 40
