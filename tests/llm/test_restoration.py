"""Checkout and restore: exact, refused whole when anything is wrong, and without a trace when refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.llm.models import chunk_files, decoder_config, edit_config, held, load, same_bits, save_model, some_tokens

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.errors import Corrupt, Error, Incompatible, InvalidInput, NotFound
from forkpoint.ids import ObjectKind
from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository
from forkpoint.state.manifest import encode_manifest
from forkpoint.store.local import LocalStore
from forkpoint.testing.faulty_store import FaultyStore

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)


def details(value: Continuation, count: int = 32) -> list[tuple[int, bytes]]:
    """Tokens and logits of a greedy run."""
    items = value.stream(count, sampling=Sampling(logit_bias=ENDLESS))
    return [(item.choice.token, item.logits.tobytes()) for item in items if item.choice and item.logits is not None]


def stats(engine: TransformersEngine) -> dict[str, int]:
    gc.collect()
    return held(engine)


# -- exactness in one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_five_times_restoring_after_a_system_prompt_gives_five_equal_answers(
    engines: Callable[..., TransformersEngine], repo: Repository, dtype: str
) -> None:
    engine = engines("llama", dtype)
    engine.start(some_tokens(300)).commit(repo, "system")
    prompt = some_tokens(23, seed=4)
    answers = [details(engine.checkout(repo, "system").extend(prompt)) for _ in range(5)]
    assert answers == [details(engine.start(some_tokens(300)).extend(prompt))] * 5
    assert len(answers[0]) == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
        {"hidden_size": 80, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 80},
        {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
        {"hidden_size": 63, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 22},
    ],
)
@pytest.mark.parametrize("context", [None, 701])
def test_odd_sizes_go_on_exactly_from_a_buffer_of_another_capacity(
    tmp_path: Path, model_cache: Path, changes: dict[str, object], context: int | None
) -> None:
    folder = save_model(tmp_path / "odd", decoder_config("llama", **changes))
    for dtype in ("float32", "bfloat16"):
        engine = load(folder, model_cache, dtype=dtype, max_context=context)
        for length in (3, 255, 256, 261, 600):
            value = engine.start(some_tokens(length))
            restored = engine.restore(value.snapshot())
            for added in (some_tokens(1), some_tokens(5), some_tokens(70)):
                assert details(value.extend(added), 4) == details(restored.extend(added), 4)


def test_a_receipt_counts_what_was_restored(engine: TransformersEngine, repo: Repository) -> None:
    value = engine.start(some_tokens(600))
    value.commit(repo, "main")
    seen: list[tuple[int, int]] = []
    receipt = engine.checkout(repo, "main", progress=lambda done, total: seen.append((done, total))).receipt
    assert (receipt.operation, receipt.claim, receipt.manifest_id) == ("checkout", "invariance", value.id)
    assert (receipt.tokens_restored, receipt.tokens_computed, receipt.chunks_verified) == (599, 0, 3)
    assert receipt.bytes_restored == sum(path.stat().st_size for path in chunk_files(repo))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert engine.restore(value.snapshot()).receipt.operation == "restore"


def test_names_lead_to_the_continuation_they_mean(engine: TransformersEngine, repo: Repository) -> None:
    first = engine.start(some_tokens(20))
    first.commit(repo, "main")
    second = first.extend([3, 4])
    second.commit(repo, "main")
    for name, value in (("main", second), ("main~1", first), ("main@{1}", first), (second.id, second)):
        assert engine.checkout(repo, name).tokens == value.tokens
    with pytest.raises(NotFound):
        engine.checkout(repo, "nowhere")


def test_a_snapshot_has_the_size_it_was_said_to_have_and_equal_values_equal_bytes(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(300))
    assert len(value.snapshot()) == value.snapshot_size()
    assert value.snapshot() == value.snapshot() == engine.start(some_tokens(300)).snapshot()


# -- damage -----------------------------------------------------------------------------------------------------------


def flip_late(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_late, truncate, empty])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_chunk_is_refused_and_leaves_no_trace(
    engines: Callable[..., TransformersEngine],
    tmp_path: Path,
    damage: Callable[[Path], None],
    which: int,
) -> None:
    engine = engines("qwen3")
    clean = details(engine.start(some_tokens(40, seed=8)), 6)
    with Repository.create(tmp_path) as repo:
        engine.start(some_tokens(600)).commit(repo, "broken")
        files = chunk_files(repo)
        engine.start(some_tokens(600, seed=1)).commit(repo, "sound")
    damage(files[which])
    before = stats(engine)
    with Repository.open(tmp_path) as repo:
        with pytest.raises(Corrupt):
            engine.checkout(repo, "broken")
        assert stats(engine) == before
        assert details(engine.start(some_tokens(40, seed=8)), 6) == clean
        assert engine.checkout(repo, "sound").tokens == tuple(some_tokens(600, seed=1))
        assert repo.verify("sound").num_chunks == 3
        with pytest.raises(Corrupt):
            repo.verify("broken")


def test_a_missing_chunk_is_refused_and_leaves_no_trace(engine: TransformersEngine, repo: Repository) -> None:
    engine.start(some_tokens(600)).commit(repo, "main")
    chunk_files(repo)[1].unlink()
    before = stats(engine)
    with pytest.raises(NotFound):
        engine.checkout(repo, "main")
    assert stats(engine) == before


def test_any_flipped_or_missing_byte_of_a_snapshot_is_refused(engine: TransformersEngine) -> None:
    value = engine.start(some_tokens(8))
    data = value.snapshot()
    before = stats(engine)
    for place in range(0, len(data), 97):
        with pytest.raises(Error):
            engine.restore(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        with pytest.raises(Error):
            engine.restore(data[:place])
    for garbage in (b"", b"\0", b"garbage" * 100, data + b"\0", data + data):
        with pytest.raises(Corrupt):
            engine.restore(garbage)
    assert stats(engine) == before
    assert engine.restore(data).id == value.id


def test_chunks_of_another_shape_under_the_right_fingerprint_are_refused(
    engine: TransformersEngine, engines: Callable[..., TransformersEngine], repo: Repository
) -> None:
    """Somebody's manifest may claim this model's fingerprint and name chunks that are whole, but not of this model."""
    value = engine.start(some_tokens(20))
    other = engines("qwen3", "bfloat16").start(some_tokens(20))
    mine, theirs = value._draft(), other._draft()
    repo.publish(replace(mine, groups=theirs.groups), branch="forged")
    before = stats(engine)
    with pytest.raises(Corrupt) as caught:
        engine.checkout(repo, "forged")
    assert caught.value.code == "corrupt.continuation"
    del caught  # its traceback holds what was being filled
    assert stats(engine) == before


def test_groups_that_carry_other_tokens_than_each_other_are_refused(
    engines: Callable[..., TransformersEngine], repo: Repository
) -> None:
    engine = engines("gemma4")
    one, two = engine.start(some_tokens(20))._draft(), engine.start(some_tokens(20, seed=1))._draft()
    assert len(one.groups) == 2
    repo.publish(replace(one, groups=(one.groups[0], two.groups[1])), branch="mixed")
    with pytest.raises(Corrupt) as caught:
        engine.checkout(repo, "mixed")
    assert "different token ids" in caught.value.message


def test_groups_in_another_number_or_that_end_elsewhere_are_refused(
    engines: Callable[..., TransformersEngine], repo: Repository
) -> None:
    engine = engines("gemma4")
    one, longer = engine.start(some_tokens(20))._draft(), engine.start(some_tokens(300))._draft()
    chunks = longer.groups[1].chunks
    for number, groups in enumerate(
        (
            one.groups[:1],
            (one.groups[0], longer.groups[1]),
            (longer.groups[0], replace(longer.groups[1], chunks=chunks[::-1])),
            (longer.groups[0], replace(longer.groups[1], chunks=chunks[:1] * 2)),
            (longer.groups[0], replace(longer.groups[1], kind="boundary")),
        )
    ):
        draft = one if number < 2 else longer
        try:
            published = repo.publish(replace(draft, groups=groups))
        except Error:
            continue  # refused already when it was to be published
        with pytest.raises(Corrupt):
            engine.checkout(repo, published.manifest_id)


# -- another layout ---------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[tuple[Repository, FaultyStore]]:
    """A repository whose store counts its calls."""
    store = FaultyStore(LocalStore(tmp_path / "objects"))
    with Repository(store=store, catalog=Catalog.create(sqlite_url(tmp_path / "catalog.db"))) as repository:
        yield repository, store


def reads(store: FaultyStore) -> int:
    return store.num_calls("get") + store.num_calls("read_range")


@pytest.mark.parametrize(
    ("changes", "dtype", "field"),
    [
        ({}, "float16", "compute_dtype"),
        ({"num_key_value_heads": 4, "head_dim": 8, "num_attention_heads": 8}, "bfloat16", "config.head_dim"),
        ({"num_key_value_heads": 1, "head_dim": 32, "num_attention_heads": 2}, "bfloat16", "config.head_dim"),
    ],
)
def test_state_of_equal_size_and_another_layout_is_refused_before_a_chunk_is_read(
    engines: Callable[..., TransformersEngine],
    counted: tuple[Repository, FaultyStore],
    tmp_path: Path,
    model_cache: Path,
    changes: dict[str, object],
    dtype: str,
    field: str,
) -> None:
    repository, store = counted
    writer = engines("llama", "bfloat16")
    value = writer.start(some_tokens(300))
    value.commit(repository, "main")
    reader = load(save_model(tmp_path / "other", decoder_config("llama", **changes)), model_cache, dtype=dtype)
    assert sum(group.token_bytes for group in reader.groups) == sum(group.token_bytes for group in writer.groups)
    before, resident = reads(store), stats(reader)
    with pytest.raises(Incompatible) as caught:
        reader.checkout(repository, "main")
    assert caught.value.code == "incompatible.state_identity"
    assert caught.value.data["field"] == field
    assert reads(store) - before == 1  # the manifest
    assert stats(reader) == resident
    with pytest.raises(Incompatible):
        reader.restore(value.snapshot())


# -- execution identity -----------------------------------------------------------------------------------------------


def test_a_restore_across_an_execution_difference_is_opt_in_and_said(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.start(some_tokens(600))
    draft = value._draft()
    foreign = replace(draft.fingerprint, execution={**draft.fingerprint.execution, "kernel": "another.1"})
    repo.publish(replace(draft, fingerprint=foreign), branch="main")
    with pytest.raises(Incompatible) as caught:
        engine.checkout(repo, "main")
    assert caught.value.code == "incompatible.execution_identity"
    assert (caught.value.data["field"], caught.value.data["want"]) == ("kernel", '"another.1"')
    restored = engine.checkout(repo, "main", allow_execution_difference=True)
    assert restored.receipt.claim == "bytes"
    assert "kernel" in restored.receipt.notes[0]
    assert same_bits(restored.logits(), value.logits())
    restored.extend(some_tokens(300)).commit(repo, "main")
    longer = [*some_tokens(600), *some_tokens(300), 5]
    assert engine.start(longer, repository=repo).receipt.tokens_restored == 0


# -- nothing to restore -----------------------------------------------------------------------------------------------


def test_a_value_of_one_token_is_committed_and_restored(engine: TransformersEngine, repo: Repository) -> None:
    value = engine.start([7])
    value.commit(repo, "main")
    for restored in (engine.checkout(repo, "main"), engine.restore(value.snapshot())):
        assert (restored.tokens, restored.position) == ((7,), 0)
        assert details(restored, 3) == details(value, 3)


def test_an_empty_session_is_saved_and_restored_as_an_empty_one(engine: TransformersEngine) -> None:
    data = engine.decode_session().snapshot()
    session = engine.decode_session()
    session.step(5)
    session.restore(data)
    assert (session.size, session.tokens) == (0, ())
    assert same_bits(session.step(5), engine.decode_session().step(5))
    with pytest.raises(InvalidInput) as caught:
        engine.restore(data)
    assert caught.value.code == "invalid_input.pending"


def test_a_failed_restore_leaves_the_live_session_where_it_was(
    engine: TransformersEngine, engines: Callable[..., TransformersEngine]
) -> None:
    session, twin = engine.decode_session(), engine.decode_session()
    for token in some_tokens(30):
        session.step(token)
        twin.step(token)
    data = session.snapshot()
    for attempt in (
        b"",
        data[: len(data) // 2],
        data[:-1],
        b"x" * 500,
        bytes([*data[:-200], data[-200] ^ 1, *data[-199:]]),
        engines("qwen3").decode_session().snapshot(),
    ):
        with pytest.raises((Corrupt, Incompatible)):
            session.restore(attempt)
        assert (session.size, session.tokens) == (30, twin.tokens)
    assert same_bits(session.step(9), twin.step(9))


def test_a_failed_checkout_leaves_live_continuations_where_they_were(
    engine: TransformersEngine, repo: Repository
) -> None:
    value = engine.start(some_tokens(30))
    value.commit(repo, "main")
    expected = details(value, 5)
    flip_late(chunk_files(repo)[0])
    for name in ("main", "missing", "b3:" + "0" * 64):
        with pytest.raises(Error):
            engine.checkout(repo, name)
    assert details(value, 5) == expected


def test_a_boundary_that_lies_is_refused(engine: TransformersEngine, repo: Repository) -> None:
    draft = engine.start(some_tokens(20))._draft()
    for change in (
        {"position": 18},
        {"position": 20},
        {"prompt_length": 22},
        {"pending": 9999},
        {"offset": -1},
        {"sampling": {}},
    ):
        manifest = replace(draft, boundary={**draft.boundary, **change})
        try:
            published = repo.publish(manifest)
        except Error:
            continue  # refused already when it was to be published
        with pytest.raises(Error):
            engine.checkout(repo, published.manifest_id)
    assert repo.store.has(ObjectKind.MANIFEST, engine.start(some_tokens(20)).commit(repo, "main").manifest_id)
    assert encode_manifest(repo.manifest(repo.resolve("main")))


def test_a_changed_field_of_the_configuration_is_named(
    engine: TransformersEngine, repo: Repository, tmp_path: Path, model_cache: Path
) -> None:
    engine.start(some_tokens(20)).commit(repo, "main")
    folder = save_model(tmp_path / "changed", decoder_config("llama"))
    edit_config(folder, rms_norm_eps=1e-3)
    with pytest.raises(Incompatible) as caught:
        load(folder, model_cache).checkout(repo, "main")
    assert caught.value.data["field"] == "config.rms_norm_eps"
    assert caught.value.data["have"] == "0.001"
