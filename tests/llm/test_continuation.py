"""Continuations as values: the boundary rules, immutability, ids and parents, errors."""

from __future__ import annotations

import itertools

import pytest
from tests.llm.models import CONTEXT, VOCABULARY, counted_rows, same_bits, some_tokens

from forkpoint.errors import CapacityExceeded, Conflict, InvalidInput
from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository
from forkpoint.state.manifest import Parent, manifest_id

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)
DRAWN = Sampling(temperature=0.9, seed=3, logit_bias=ENDLESS)


def alone(engine: TransformersEngine, *pieces: list[int]) -> Continuation:
    """What a value has that was made by these appends and nothing else."""
    value = engine.start(pieces[0])
    for piece in pieces[1:]:
        value = value.extend(piece)
    return value


def equal(left: Continuation, right: Continuation) -> bool:
    return left.tokens == right.tokens and same_bits(left.logits(), right.logits()) and left.id == right.id


# -- the boundary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 256, 257, 258])
def test_a_prompt_of_m_tokens_prefills_m_minus_1_and_leaves_the_last_pending(
    engine: TransformersEngine, count: int
) -> None:
    tokens = some_tokens(count)
    with counted_rows(engine) as rows:
        value = engine.start(tokens)
    assert value.tokens == tuple(tokens)
    assert value.position == count - 1 == len(value.tokens) - 1
    assert value.pending == tokens[-1]
    assert value.receipt.tokens_computed == count - 1
    assert rows == [min(256, count - 1 - start) for start in range(0, count - 1, 256)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 255, 256, 300])
def test_appending_k_tokens_forwards_exactly_k_rows(engine: TransformersEngine, count: int) -> None:
    value = engine.start(some_tokens(10))
    added = some_tokens(count, seed=1)
    with counted_rows(engine) as rows:
        longer = value.extend(added)
    first = min(count, 256 - 9)
    pieces = [first, *([count - first] if count > first else [])]
    assert rows == pieces
    assert longer.receipt.tokens_computed == count
    assert longer.receipt.tokens_reused == 9
    assert longer.tokens == (*value.tokens, *added)
    assert longer.position == value.position + count
    assert longer.pending == added[-1]


def test_generating_appends_what_it_chose_and_steps_once_for_each(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(10))
    with counted_rows(engine) as rows:
        done = value.generate(6, sampling=DRAWN)
    assert done.completion is not None
    assert rows == [1] * 6
    assert done.tokens == (*value.tokens, *(choice.token for choice in done.completion.choices))
    assert (done.position, done.receipt.tokens_computed) == (15, 6)
    assert done.sampling == DRAWN


def test_text_is_tokenised_alone_and_prompts_as_the_tokenizer_begins_them(engine: TransformersEngine) -> None:
    value = engine.start("the keeper").extend(" opened the door")
    assert value.tokens == (*engine.encode("the keeper"), *engine.encode(" opened the door"))
    assert value.text == "the keeper opened the door"


def test_state_bytes_are_those_of_the_processed_tokens(engine: TransformersEngine) -> None:
    assert engine.start(some_tokens(11)).state_bytes == 10 * 3 * 2 * 32 * 4
    assert engine.start(some_tokens(1)).state_bytes == 0


def test_logits_change_nothing_and_are_what_the_next_step_sees(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(20))
    before = (value.tokens, value.id)
    first = value.logits()
    (item,) = [item for item in value.stream(1) if item.choice is not None]
    assert item.logits is not None
    assert same_bits(first, item.logits)
    assert same_bits(first, value.logits())
    assert (value.tokens, value.id) == before


def test_the_ways_to_go_on_from_nowhere_or_with_nothing_are_refused(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(5))
    for attempt, code in (
        (lambda: engine.start(""), "invalid_input.empty"),
        (lambda: engine.start([]), "invalid_input.empty"),
        (lambda: value.extend(""), "invalid_input.empty"),
        (lambda: value.extend([]), "invalid_input.empty"),
        (lambda: value.extend([VOCABULARY]), "invalid_input.token"),
        (lambda: value.extend([2, -1]), "invalid_input.token"),
        (lambda: value.extend([2, True]), "invalid_input.token"),
        (lambda: engine.start([3, VOCABULARY]), "invalid_input.token"),
        (lambda: value.fork(0), "invalid_input.count"),
        (lambda: value.generate(-1), "invalid_input.max_tokens"),
        (lambda: list(value.stream(-1)), "invalid_input.max_tokens"),
    ):
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert caught.value.code == code
    assert equal(value, alone(engine, some_tokens(5)))


def test_the_last_of_extended_tokens_is_checked_though_it_is_only_pending(engine: TransformersEngine) -> None:
    with pytest.raises(InvalidInput, match="not an id"):
        engine.start([2, 3]).extend([4, VOCABULARY + 5])


def test_a_context_that_is_full_is_a_typed_error_and_loses_nothing(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(CONTEXT - 2))
    with pytest.raises(CapacityExceeded) as caught:
        value.extend(some_tokens(6))
    assert caught.value.code == "capacity.context"
    assert caught.value.data["have"] == CONTEXT
    full = value.extend(some_tokens(3))
    assert full.position == CONTEXT
    done = full.generate(4)
    assert done.completion is not None
    assert (done.completion.finish_reason, done.completion.choices, done.tokens) == ("length", (), full.tokens)
    with pytest.raises(CapacityExceeded):
        full.logits()
    partly = value.generate(9, sampling=Sampling(logit_bias=ENDLESS))
    assert partly.completion is not None
    assert (partly.completion.finish_reason, len(partly.completion.choices)) == ("length", 3)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 200, 255, 256, 257, 258, 300, 513])
def test_forks_diverge_without_touching_each_other_or_the_parent_in_every_order(
    engine: TransformersEngine, length: int
) -> None:
    prompt, pieces = some_tokens(length), [some_tokens(count, seed=count) for count in (1, 3, 70)]
    expected = [alone(engine, prompt, piece) for piece in pieces]
    for order in itertools.permutations(range(3)):
        parent = engine.start(prompt)
        forks = {which: parent.extend(pieces[which]) for which in order}
        assert all(equal(forks[which], expected[which]) for which in order)
        assert equal(parent, alone(engine, prompt))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freeing_any_of_several_forks_leaves_the_others_intact(
    engine: TransformersEngine, order: tuple[int, ...]
) -> None:
    prompt = some_tokens(260)
    values = {0: engine.start(prompt)}
    values[1], values[2] = values[0].extend([5, 6, 7]), values[0].extend([8, 9])
    expected = {0: alone(engine, prompt), 1: alone(engine, prompt, [5, 6, 7]), 2: alone(engine, prompt, [8, 9])}
    for freed in order:
        del values[freed]
        noise = engine.start(some_tokens(300, seed=99))
        for which, value in values.items():
            assert equal(value, expected[which])
            assert equal(value.extend([11]), expected[which].extend([11]))
        del noise


def test_an_old_value_is_usable_after_everything_that_was_done_to_it(engine: TransformersEngine) -> None:
    prompt = some_tokens(40)
    value = engine.start(prompt, sampling=DRAWN)
    before = (value.tokens, value.position, value.id, value.logits().tobytes())
    value.extend([4, 5])
    value.generate(5)
    value.fork(3)
    value.score([[7, 8], [9]])
    list(value.stream(3))
    value.snapshot()
    assert (value.tokens, value.position, value.id, value.logits().tobytes()) == before
    assert value.generate(5).tokens == engine.start(prompt, sampling=DRAWN).generate(5).tokens


def test_a_plain_fork_repeats_exactly_and_numbered_forks_draw_from_their_own_streams(
    engine: TransformersEngine,
) -> None:
    value = engine.start(some_tokens(20), sampling=DRAWN)
    plain = value.fork()
    assert isinstance(plain, Continuation)
    assert plain.generate(12).tokens == value.generate(12).tokens
    forks = value.fork(3)
    assert isinstance(forks, list)
    drawn = [fork.generate(12).tokens for fork in forks]
    assert drawn[0] == value.generate(12).tokens
    assert len(set(drawn)) == 3
    assert [fork.sampling.stream for fork in forks] == [0, 1, 2]
    assert drawn[1:] == [fork.generate(12).tokens for fork in value.fork(3)[1:]]  # type: ignore[index]


def test_forking_copies_nothing_until_a_fork_goes_on(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(300))
    with counted_rows(engine) as rows:
        before = engine.stats()
        forks = value.fork(50)
        assert engine.stats() == before
    assert rows == []
    del forks


# -- ids and parents --------------------------------------------------------------------------------------------------


def test_the_id_is_the_digest_of_the_manifest_that_a_commit_writes(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.start(some_tokens(300), sampling=DRAWN)
    early = value.id
    publication = value.commit(repo, "main")
    assert early == publication.manifest_id == value.id == repo.resolve("main")
    assert manifest_id(repo.manifest(early)) == early
    assert repo.tokens(early) == list(value.tokens)
    assert repo.verify("main").num_chunks == 2


def test_an_id_does_not_change_when_ancestors_are_committed_later(engine: TransformersEngine, repo: Repository) -> None:
    root = engine.start(some_tokens(30))
    child = root.extend([3, 4])
    before = child.id
    root.commit(repo, "main")
    assert child.id == before == child.commit(repo, "other").manifest_id
    assert repo.manifest(before).parents == ()


def test_the_parent_is_the_nearest_committed_ancestor(engine: TransformersEngine, repo: Repository) -> None:
    root = engine.start(some_tokens(30))
    root.commit(repo, "main")
    middle = root.extend([3]).generate(2)
    leaf = middle.extend([5]).fork()
    assert isinstance(leaf, Continuation)
    leaf.commit(repo, "main")
    assert repo.manifest(leaf.id).parents == (Parent(role="continues", manifest_id=root.id),)
    middle.commit(repo, "side", expect="anything")
    last = leaf.extend([6])
    last.commit(repo, "main")
    assert repo.manifest(last.id).parents == (Parent(role="continues", manifest_id=leaf.id),)
    assert [entry.row.manifest_id for entry in repo.log("main")] == [last.id, leaf.id, root.id]


def test_a_branch_that_is_elsewhere_is_a_conflict(engine: TransformersEngine, repo: Repository) -> None:
    engine.start(some_tokens(30)).commit(repo, "main")
    with pytest.raises(Conflict) as caught:
        engine.start(some_tokens(31, seed=1)).commit(repo, "main")
    assert caught.value.code == "conflict.ref"


def test_what_is_checked_out_or_restored_is_the_same_value_with_the_same_id_and_parents(
    engine: TransformersEngine, repo: Repository
) -> None:
    root = engine.start(some_tokens(30))
    root.commit(repo, "main")
    value = root.extend([3, 4])
    value.commit(repo, "main")
    for again in (engine.checkout(repo, "main"), engine.restore(value.snapshot())):
        assert again.id == value.id
        publication = again.commit(repo, "other")
        assert (publication.manifest_id, publication.was_new) == (value.id, False)
        assert again.id == value.id
        assert again.snapshot() == value.snapshot()
    after = engine.restore(value.snapshot()).extend([5])
    after.commit(repo, "side")
    assert repo.manifest(after.id).parents == (Parent(role="continues", manifest_id=root.id),)


def test_committing_twice_writes_nothing_and_a_child_writes_only_what_is_new(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.start(some_tokens(600))
    first = value.commit(repo, "main")
    again = value.commit(repo, "main")
    assert (first.was_new, first.chunks_written) == (True, 3)
    assert (again.was_new, again.chunks_written, again.manifest_id) == (False, 0, first.manifest_id)
    grown = value.extend(some_tokens(300, seed=2)).commit(repo, "main")
    assert (grown.chunks_shared, grown.chunks_written) == (2, 2)


def test_a_fork_of_a_committed_value_shares_its_full_chunks_even_from_a_copied_buffer(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.start(some_tokens(600))
    value.extend([3])
    value.commit(repo, "main")
    copied = value.extend([4])
    assert copied.commit(repo, "main").chunks_shared == 2
    assert repo.verify("main").num_tokens == 601


def test_equal_values_made_apart_have_one_id(engine: TransformersEngine) -> None:
    one, two = alone(engine, some_tokens(70), [3, 4]), alone(engine, some_tokens(70), [3, 4])
    assert one.id == two.id
    assert one.id != alone(engine, some_tokens(70), [3, 5]).id
    assert one.id != one.with_sampling(DRAWN).id
