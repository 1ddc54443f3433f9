"""Starting from what is stored: the longest prefix of whole chunks, of the same model, that was computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.llm.conftest import Folders
from tests.llm.models import chunk_files, counted_rows, load, same_bits, some_tokens

from forkpoint.llm import Sampling, TransformersEngine
from forkpoint.llm.engines import runtime, selftest
from forkpoint.llm.engines.selftest import Findings, FindingsCache, Passes
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

TOKENS = some_tokens(1100)
ENDLESS = Sampling(logit_bias=((1, -100.0),))


def without_invariance(folders: Folders, model_cache: Path) -> TransformersEngine:
    """An engine that found at load that its results depend on how they are computed."""

    def find(passes: Passes, max_tokens: int) -> Findings:
        return replace(selftest.measure(passes, max_tokens), differing=("in other pieces",))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "measure", find)
        patch.setattr(FindingsCache, "find", lambda *_: None)
        patch.setattr(FindingsCache, "put", lambda *_: None)
        return load(folders("llama"), model_cache)


@pytest.mark.parametrize(
    ("length", "restored"), [(1, 0), (256, 0), (257, 256), (300, 256), (512, 256), (513, 512), (700, 512), (1100, 512)]
)
def test_the_longest_stored_prefix_is_restored_and_the_rest_computed(
    engine: TransformersEngine, repo: Repository, length: int, restored: int
) -> None:
    engine.start(TOKENS[:700]).commit(repo, "main")
    cold = engine.start(TOKENS[:length])
    with counted_rows(engine) as rows:
        warm = engine.start(TOKENS[:length], repository=repo)
    assert (warm.receipt.tokens_restored, warm.receipt.tokens_computed) == (restored, length - 1 - restored)
    assert warm.receipt.chunks_verified == restored // 256
    assert sum(rows) == length - 1 - restored
    assert warm.id == cold.id
    assert same_bits(warm.logits(), cold.logits())


def test_a_prompt_that_differs_in_one_token_shares_only_the_chunks_before_it(
    engine: TransformersEngine, repo: Repository
) -> None:
    engine.start(TOKENS).commit(repo, "main")
    for place, restored in ((0, 0), (255, 0), (256, 256), (900, 768)):
        changed = [*TOKENS]
        changed[place] = changed[place] % 300 + 3
        assert engine.start(changed, repository=repo).receipt.tokens_restored == restored


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "deepseek_v3"])
def test_models_of_every_kind_of_layer_reuse_prefixes(
    engines: Callable[..., TransformersEngine], repo: Repository, name: str
) -> None:
    engine = engines(name)
    engine.start(TOKENS[:600]).commit(repo, "main")
    warm = engine.start(TOKENS[:600], repository=repo)
    assert warm.receipt.tokens_restored == 512
    assert warm.id == engine.start(TOKENS[:600]).id


def test_what_is_started_from_a_prefix_shares_its_chunks_when_committed(
    engine: TransformersEngine, repo: Repository
) -> None:
    engine.start(TOKENS[:600]).commit(repo, "main")
    publication = engine.start([*TOKENS[:600], 5, 6], repository=repo).commit(repo, "other")
    assert (publication.chunks_shared, publication.chunks_written) == (2, 1)


def test_a_prefix_that_came_from_outside_is_never_reused_nor_what_continues_it(
    engine: TransformersEngine, repo: Repository
) -> None:
    repo.commit_bundle(engine.start(TOKENS[:600]).snapshot(), branch="fetched")
    assert engine.start(TOKENS[:600], repository=repo).receipt.tokens_restored == 0
    engine.checkout(repo, "fetched").extend(TOKENS[600:900]).commit(repo, "fetched")
    assert engine.start(TOKENS[:900], repository=repo).receipt.tokens_restored == 0
    engine.restore(engine.start(TOKENS[:600]).snapshot()).extend(TOKENS[600:900]).commit(repo, "restored")
    assert engine.start(TOKENS[:900], repository=repo).receipt.tokens_restored == 0
    session = engine.decode_session()
    session.restore(engine.start(TOKENS[:600]).snapshot())
    session.continuation(5).commit(repo, "session")
    assert engine.start(TOKENS[:900], repository=repo).receipt.tokens_restored == 0
    engine.start(TOKENS[:600]).commit(repo, "own")
    assert engine.start(TOKENS[:900], repository=repo).receipt.tokens_restored == 512


def test_a_session_that_is_reset_after_a_restore_is_trusted_again(engine: TransformersEngine, repo: Repository) -> None:
    session = engine.decode_session()
    session.restore(engine.start(TOKENS[:20]).snapshot())
    session.reset()
    for token in TOKENS[:257]:
        session.step(token)
    published = session.continuation(5).commit(repo, "session")
    assert repo.row(published.manifest_id).is_trusted


def test_every_full_chunk_is_found_by_a_cold_start_however_it_was_computed(
    engine: TransformersEngine, repo: Repository
) -> None:
    assert engine.exactness.claim == "invariance"
    session = engine.decode_session()
    for token in TOKENS[:300]:
        session.step(token)
    ways = {
        "decoded": engine.start(TOKENS[:300], sampling=ENDLESS).generate(300),
        "stepped": session.continuation(5),
        "ragged": engine.start(TOKENS[300:400]).extend(TOKENS[400:900]),
        "together": engine.generate_many([engine.start([7, *TOKENS[:300]]), engine.start(TOKENS[:9])], 250)[0],
    }
    for name, value in ways.items():
        value.commit(repo, name)
    ways["went on"] = engine.checkout(repo, "ragged").extend(TOKENS[:300])
    ways["went on"].commit(repo, "ragged")
    for name, value in ways.items():
        told, cold = value.tokens, engine.start(value.tokens)
        warm = engine.start(told, repository=repo)
        assert warm.receipt.tokens_restored == (len(told) - 1) // 256 * 256, name
        assert warm.id == cold.id, name
        assert same_bits(warm.logits(), cold.logits()), name


def test_without_invariance_only_chunks_that_were_prefilled_in_one_piece_are_found_by_a_cold_start(
    folders: Folders, model_cache: Path, repo: Repository
) -> None:
    engine = without_invariance(folders, model_cache)
    engine.start(TOKENS[:300], sampling=ENDLESS).generate(300).commit(repo, "decoded")
    told = engine.checkout(repo, "decoded").tokens
    assert len(told) == 600
    assert engine.start(told, repository=repo).receipt.tokens_restored == 256
    engine.start(TOKENS[300:400]).extend(TOKENS[400:900]).commit(repo, "ragged")
    assert engine.start(TOKENS[300:900], repository=repo).receipt.tokens_restored == 0
    engine.checkout(repo, "ragged").extend(TOKENS[:300]).commit(repo, "ragged")
    assert engine.start([*TOKENS[300:900], *TOKENS[:300]], repository=repo).receipt.tokens_restored == 0


def test_without_invariance_passes_are_of_one_lane_and_pieces_of_one_chunk(folders: Folders, model_cache: Path) -> None:
    engine = without_invariance(folders, model_cache)
    assert (engine.exactness.claim, engine.report().lanes) == ("continuation", 1)
    assert engine.fingerprint.execution["rows"] == {"piece": 256}
    value = engine.start(TOKENS[:20], sampling=ENDLESS)
    assert value.receipt.claim == "continuation"
    with counted_rows(engine) as rows:
        values = value.generate_many([TOKENS[:300], TOKENS[:3]], 2)
        value.score([TOKENS[:3], TOKENS[:9]])
    assert rows == [237, 63, 3, *[1] * 4, 3, 9]
    alone = [value.extend(TOKENS[:count]).generate(2).id for count in (300, 3)]
    assert [each.id for each in values] == alone


def test_a_warm_start_has_the_bits_of_a_cold_one(engine: TransformersEngine, repo: Repository) -> None:
    cold = engine.start(TOKENS[:700])
    engine.start(TOKENS[:600]).commit(repo, "main")
    warm = engine.start(TOKENS[:700], repository=repo)
    assert warm.receipt.tokens_restored == 512
    assert warm.id == cold.id


def test_the_mark_of_prefilled_chunks_survives_a_commit(engine: TransformersEngine, repo: Repository) -> None:
    engine.start(TOKENS[:513]).commit(repo, "main")
    engine.checkout(repo, "main").extend(TOKENS[513:770]).commit(repo, "main")
    assert engine.start(TOKENS[:800], repository=repo).receipt.tokens_restored == 768


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_prefix_costs_a_recomputation_and_is_noted(
    engine: TransformersEngine, repo: Repository, damage: str
) -> None:
    value = engine.start(TOKENS[:600])
    value.commit(repo, "main")
    for path in chunk_files(repo):
        if damage == "missing":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[-200] ^= 1
            path.write_bytes(data)
    again = engine.start(TOKENS[:600], repository=repo)
    assert (again.receipt.tokens_restored, again.receipt.tokens_computed) == (0, 599)
    assert "could not be used" in again.receipt.notes[0]
    assert again.id == value.id


def test_chats_reuse_prefixes_too(engine: TransformersEngine, repo: Repository) -> None:
    messages = [{"role": "system", "content": "the keeper opened the door " * 70}, {"role": "user", "content": "light"}]
    engine.chat(messages).commit(repo, "main")
    longer = [*messages, {"role": "assistant", "content": "out"}, {"role": "user", "content": "door"}]
    assert engine.chat(longer, repository=repo).receipt.tokens_restored >= 256
