"""Conversations: turns keep the common prefix, say what did not match, and outlive the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.llm.models import counted_rows, decoder_config, load, same_bits, save_model

from forkpoint.errors import CapacityExceeded, InvalidInput
from forkpoint.llm import Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

ENDLESS = Sampling(temperature=0.7, seed=2, logit_bias=((0, -100.0), (1, -100.0)))
MESSAGES = [{"role": "system", "content": "the keeper"}, {"role": "user", "content": "the door"}]


def rendered(engine: TransformersEngine, text: str) -> tuple[int, ...]:
    return tuple(engine.encode(text))


def test_a_chat_is_rendered_up_to_where_the_model_answers(engine: TransformersEngine) -> None:
    value = engine.chat(MESSAGES)
    assert value.text == "<s>system: the keeper</s><s>user: the door</s><s>assistant: "
    assert value.messages == tuple(MESSAGES)


def test_a_turn_keeps_what_the_conversation_shares_with_the_history(engine: TransformersEngine) -> None:
    value = engine.chat(MESSAGES[:1])
    with counted_rows(engine) as rows:
        said = value.say("the door")
    expected = engine.chat(MESSAGES)
    shared = len(rendered(engine, "<s>system: the keeper</s><s>"))
    assert said.tokens == expected.tokens
    assert said.messages == tuple(MESSAGES)
    assert said.receipt.tokens_computed == len(said.tokens) - shared == sum(rows)
    assert said.receipt.tokens_reused == shared - 1
    assert f"differs from token {shared} on" in said.receipt.notes[0]
    assert f"{len(value.tokens) - shared} tokens were left behind" in said.receipt.notes[0]
    assert value.text.endswith("<s>assistant: ")


def test_a_turn_after_an_answer_goes_on_from_the_answer(reciting: TransformersEngine) -> None:
    """With a template that renders an answer as the model wrote it, nothing is left behind."""
    value = reciting.chat([{"role": "user", "content": "the door"}])
    answered = value.answer(5, sampling=ENDLESS)
    assert answered.completion is not None
    assert answered.messages == (*value.messages, {"role": "assistant", "content": answered.completion.text})
    said = answered.say("the light")
    assert [message["role"] for message in said.messages] == ["user", "assistant", "user"]
    assert said.text.startswith(value.text)
    assert said.receipt.tokens_reused >= value.position - 1


@pytest.fixture
def reciting(tmp_path: Path, model_cache: Path) -> TransformersEngine:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return load(save_model(tmp_path / "plain", decoder_config("llama"), template=template), model_cache)


def test_a_conversation_that_is_rewritten_from_its_start_is_computed_anew_and_the_old_value_stays(
    engine: TransformersEngine,
) -> None:
    value = engine.start("something else altogether")
    said = value.say("the door")
    assert said.tokens == engine.chat([{"role": "user", "content": "the door"}]).tokens
    assert same_bits(said.logits(), engine.chat([{"role": "user", "content": "the door"}]).logits())
    assert "differs from token 0 on" in said.receipt.notes[0]
    assert value.text == "something else altogether"


def test_the_rest_after_a_common_prefix_is_what_a_fresh_chat_computes(engine: TransformersEngine) -> None:
    said = engine.chat(MESSAGES[:1]).say("the door").answer(6, sampling=ENDLESS).say("and the light")
    fresh = engine.chat(said.messages)
    assert said.tokens == fresh.tokens
    assert abs(said.logits() - fresh.logits()).max() < 1e-4


def test_messages_and_sampling_survive_commit_checkout_and_snapshot(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.chat(MESSAGES, sampling=ENDLESS).answer(4)
    value.commit(repo, "main")
    for again in (engine.checkout(repo, "main"), engine.restore(value.snapshot())):
        assert (again.messages, again.sampling, again.tokens) == (value.messages, value.sampling, value.tokens)
        assert again.say("more").tokens == value.say("more").tokens
        assert again.id == value.id


def test_messages_are_part_of_what_a_value_is(engine: TransformersEngine) -> None:
    chat = engine.chat(MESSAGES)
    assert engine.start(chat.tokens).id != chat.id


def test_changing_a_message_that_was_given_changes_no_value(engine: TransformersEngine) -> None:
    messages = [dict(message) for message in MESSAGES]
    value = engine.chat(messages)
    before = value.id
    messages[0]["content"] = "changed"
    said = value.say("x")
    said.messages[0]["content"] = "changed too"  # type: ignore[index]
    assert value.messages == tuple(MESSAGES)
    assert value.say("x").messages[0] == MESSAGES[0]
    assert value.id == before


def test_the_penalties_of_an_answer_do_not_see_earlier_turns(engine: TransformersEngine) -> None:
    said = engine.chat(MESSAGES[:1]).say("the door")
    assert said._boundary().prompt_length == len(said.tokens)


def test_a_conversation_of_learned_positions_that_rolled_over_starts_anew(
    engines: Callable[..., TransformersEngine],
) -> None:
    engine = engines("gpt2")
    value = engine.chat([{"role": "user", "content": "a"}]).generate(70, sampling=ENDLESS)
    assert value._boundary().offset > 0
    said = value.say("b")
    assert said.tokens == engine.chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]).tokens
    assert said._boundary().offset == 0
    with pytest.raises(CapacityExceeded):
        value.say("word " * 80)


def test_a_model_without_template_and_messages_it_does_not_take_are_refused(
    tmp_path: Path, model_cache: Path, engine: TransformersEngine
) -> None:
    folder = save_model(tmp_path / "strict", decoder_config("llama"), template="{{ raise_exception('only users') }}")
    with pytest.raises(InvalidInput, match="only users") as caught:
        load(folder, model_cache).chat(MESSAGES)
    assert caught.value.code == "invalid_input.chat"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput) as caught:
        load(folder, model_cache).chat(MESSAGES)
    assert caught.value.code == "invalid_input.chat"
    (tmp_path / "empty").mkdir()
    nothing = save_model(tmp_path / "empty" / "model", decoder_config("llama"), template="{# nothing #}")
    with pytest.raises(InvalidInput):
        load(nothing, model_cache).start("x").say("y")


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "user", "content": ["a"]}, {}])
def test_a_message_that_is_not_text_is_refused(engine: TransformersEngine, message: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as refusal:
        engine.chat([message])  # type: ignore[list-item]
    assert refusal.value.code == "invalid_input.chat"


def test_text_that_is_no_valid_unicode_is_refused_everywhere(engine: TransformersEngine) -> None:
    value = engine.chat(MESSAGES)
    attempts: list[Callable[[], object]] = [
        lambda: engine.start("\ud800"),
        lambda: value.extend("a\udcff"),
        lambda: value.score(["\ud800"]),
        lambda: value.say("\ud800"),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidInput) as refusal:
            attempt()
        assert refusal.value.code == "invalid_input.text"
