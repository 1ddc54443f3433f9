"""The bundled model, for real: one of each claim, in the dtype that people use."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.llm.models import chunk_files, load, same_bits
from tests.llm.processes import run
from transformers import AutoModelForCausalLM

from forkpoint.errors import Corrupt
from forkpoint.llm import Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

SCENE = "The lighthouse keeper opened the door. " * 40
BUSY = Sampling(temperature=0.8, seed=7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)

RESUME = """
import hashlib
engine = load("bundled:smollm2", None, dtype="bfloat16")
with Repository.open(given) as repository:
    value = engine.checkout(repository, "main")
    with counted_rows(engine) as rows:
        longer = value.extend(" Then the light went out")
    done = engine.checkout(repository, "mid").generate(6)
    say([value.id, rows, longer.receipt.tokens_computed, digest(longer.logits()), done.tokens])
"""


def test_it_goes_on_elsewhere_bit_for_bit(smollm2: TransformersEngine, tmp_path: Path) -> None:
    value = smollm2.start(SCENE, sampling=BUSY)
    with Repository.create(tmp_path) as repo:
        value.commit(repo, "main")
        value.generate(4).commit(repo, "mid")
    longer = value.extend(" Then the light went out")
    added = len(longer.tokens) - len(value.tokens)
    found = run(RESUME, str(tmp_path), PYTHONHASHSEED="3")
    assert found == [
        value.id,
        [added],
        added,
        hashlib.sha256(longer.logits().tobytes()).hexdigest(),
        list(value.generate(10).tokens),
    ]


def test_five_restores_after_a_system_prompt_give_five_equal_answers(
    smollm2: TransformersEngine, repo: Repository
) -> None:
    smollm2.chat([{"role": "system", "content": "You are a lighthouse keeper. " * 12}]).commit(repo, "system")
    answers = []
    for _ in range(5):
        items = smollm2.checkout(repo, "system").say("What do you see?").stream(32)
        answers.append([(item.choice, item.logits.tobytes()) for item in items if item.logits is not None])
    assert answers == [answers[0]] * 5
    assert len(answers[0]) > 3


def test_its_logits_are_those_of_the_plain_model(smollm2: TransformersEngine) -> None:
    folder = smollm2._loaded.files[0].parent
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    value = smollm2.start(SCENE)
    with torch.inference_mode():
        theirs = plain(torch.tensor([value.tokens]), logits_to_keep=1).logits[0, -1].numpy()
    assert np.argmax(value.logits()) == np.argmax(theirs)
    assert np.abs(value.logits() - theirs).mean() < 0.25


def test_scores_prefer_what_makes_sense_and_do_not_depend_on_company(smollm2: TransformersEngine) -> None:
    value = smollm2.start("The capital of France is")
    texts = [" Paris", " a banana in the fridge", " London"]
    scores = value.score(texts, normalise="tokens")
    assert max(scores, key=lambda score: score.total) == scores[0]
    assert scores == [value.score([text], normalise="tokens")[0] for text in texts]


def test_a_damaged_chunk_is_refused_and_nothing_else_is_disturbed(
    smollm2: TransformersEngine, repo: Repository
) -> None:
    clean = smollm2.start("An unrelated prompt").logits()
    value = smollm2.start(SCENE)
    value.commit(repo, "main")
    path = chunk_files(repo)[0]
    data = bytearray(path.read_bytes())
    data[-300] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt):
        smollm2.checkout(repo, "main")
    assert same_bits(smollm2.start("An unrelated prompt").logits(), clean)


def test_a_conversation_streams_text_and_remembers(smollm2: TransformersEngine, repo: Repository) -> None:
    pieces: list[str] = []
    value = smollm2.chat([{"role": "user", "content": "Answer in one short sentence: what is rain?"}])
    answered = value.answer(40, on_text=pieces.append)
    assert answered.completion is not None
    assert "".join(pieces) == answered.completion.text
    assert "<|im_end|>" not in answered.completion.text
    said = answered.say("And snow?")
    answered.commit(repo, "main")
    assert smollm2.checkout(repo, "main").say("And snow?").tokens == said.tokens


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_other_dtypes_restore_and_go_on_exactly(dtype: str, repo: Repository) -> None:
    engine = load("bundled:smollm2", None, dtype=dtype)
    value = engine.start(SCENE, sampling=BUSY)
    value.commit(repo, "main")
    restored = engine.checkout(repo, "main")
    one, two = list(value.stream(16)), list(restored.stream(16))
    assert [item.choice for item in one] == [item.choice for item in two]
    assert all(
        same_bits(left.logits, right.logits) for left, right in zip(one, two, strict=True) if left.logits is not None
    )  # type: ignore[arg-type]
