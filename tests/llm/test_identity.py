"""Which model a state belongs to: refusals that name the field, weights that change under us, the cache of digests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.llm.models import (
    TEMPLATE,
    decoder_config,
    edit_config,
    load,
    make_tokenizer,
    model_of,
    runtime_of,
    same_bits,
    save_model,
    some_tokens,
)
from torch import nn

from forkpoint.errors import CapacityExceeded, Conflict, Incompatible, InvalidInput
from forkpoint.llm import Continuation, TransformersEngine
from forkpoint.llm.engines import runtime as runtime_module
from forkpoint.llm.engines.plain import plain_parameters
from forkpoint.llm.engines.selftest import FindingsCache
from forkpoint.llm.engines.weights import replace_parameters
from forkpoint.llm.kernels.linear import PackedLinear
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

TOKENS = some_tokens(600)


@pytest.fixture
def folder(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be changed."""
    return Path(shutil.copytree(folders("llama"), tmp_path / "model"))


# -- what decides the bits of a pass ------------------------------------------------------------------------------------


def test_another_number_of_threads_gives_the_same_bits_and_is_the_same_execution(
    folder: Path, model_cache: Path, repo: Repository
) -> None:
    one = load(folder, model_cache, threads=1)
    value = one.start(TOKENS[:300])
    value.commit(repo, "main")
    wanted = value.generate(4).logits()
    two = load(folder, model_cache, threads=2)
    assert two.fingerprint == one.fingerprint
    assert same_bits(two.checkout(repo, "main").generate(4).logits(), wanted)
    torch.set_num_threads(1)


def test_a_pass_runs_with_the_threads_of_the_load(folder: Path, model_cache: Path) -> None:
    engine = load(folder, model_cache, threads=1)
    value = engine.start(TOKENS[:300])
    torch.set_num_threads(2)
    try:
        assert engine.start(TOKENS[:300]).id == value.id
    finally:
        torch.set_num_threads(1)


def test_automatic_casting_around_a_call_changes_nothing(engine: TransformersEngine) -> None:
    plain = engine.start(TOKENS[:40]).logits()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(engine.start(TOKENS[:40]).logits(), plain)


def test_a_setting_of_torch_that_was_changed_since_the_load_is_refused(engine: TransformersEngine) -> None:
    value = engine.start(TOKENS[:40])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(Incompatible, match="matmul_precision") as refusal:
            value.extend(TOKENS[:3])
    finally:
        torch.set_float32_matmul_precision(before)
    assert refusal.value.code == "incompatible.settings"
    assert value.extend(TOKENS[:3]).position == 42


def test_what_ends_a_generation_is_part_of_the_execution_identity(
    folder: Path, model_cache: Path, repo: Repository
) -> None:
    load(folder, model_cache).start(TOKENS[:40]).commit(repo, "main")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 77}))
    with pytest.raises(Incompatible, match="end_tokens"):
        load(folder, model_cache).checkout(repo, "main")


def test_a_restore_across_an_execution_difference_stays_noted_in_all_that_follows(
    folder: Path, model_cache: Path, repo: Repository
) -> None:
    load(folder, model_cache, native=False).start(TOKENS[:40]).commit(repo, "main")
    engine = load(folder, model_cache)
    with pytest.raises(Incompatible) as refused:
        engine.checkout(repo, "main")
    assert (refused.value.code, refused.value.data["field"]) == ("incompatible.execution_identity", "executor")
    value = engine.checkout(repo, "main", allow_execution_difference=True).extend(TOKENS[40:50])
    assert value.receipt.claim == "bytes"
    assert "executor" in value.receipt.notes[0]
    value.commit(repo, "main")
    again = engine.checkout(repo, "main")
    assert (again.receipt.claim, again.receipt.notes) == ("bytes", value.receipt.notes)


def test_a_changed_configuration_beside_cached_weights_is_digested_anew(
    folder: Path, model_cache: Path, repo: Repository
) -> None:
    load(folder, model_cache)
    edit_config(folder, num_hidden_layers=2)
    load(folder, model_cache).start(TOKENS[:40]).commit(repo, "main")


def test_a_state_longer_than_the_context_is_refused_before_anything_is_read(
    folder: Path, model_cache: Path, repo: Repository
) -> None:
    load(folder, model_cache).start(TOKENS[:300]).commit(repo, "main")
    small = load(folder, model_cache, max_context=200)
    with pytest.raises(CapacityExceeded) as refusal:
        small.checkout(repo, "main")
    assert refusal.value.code == "capacity.context"
    assert small.stats()["lineages"] == 0


def test_windowed_layers_are_a_group_of_their_own(folders: Callable[[str], Path], model_cache: Path) -> None:
    kinds = {group.kind for group in load(folders("gemma3"), model_cache).groups}
    assert kinds == {"tokens", "window"}


# -- stored under one model, opened under another ---------------------------------------------------------------------


def change_rope(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})


def perturb_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"].view(-1)[17] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_template(folder: Path) -> None:
    make_tokenizer(template=TEMPLATE + " ").save_pretrained(folder)


def change_tokenizer(folder: Path) -> None:
    make_tokenizer(vocabulary=290).save_pretrained(folder)


def change_window(folder: Path) -> None:
    edit_config(folder, attention_bias=False, hidden_act="gelu")


@pytest.mark.parametrize(
    ("change", "dtype", "field"),
    [
        (change_rope, "float32", "config.rope_parameters.factor"),
        (perturb_weight, "float32", "parameters"),
        (change_template, "float32", "chat_template"),
        (change_tokenizer, "float32", "tokenizer"),
        (change_window, "float32", "config.hidden_act"),
        (lambda folder: None, "bfloat16", "compute_dtype"),
    ],
)
def test_state_of_another_model_is_refused_by_field_and_never_reused(
    engine: TransformersEngine,
    repo: Repository,
    folder: Path,
    model_cache: Path,
    change: Callable[[Path], None],
    dtype: str,
    field: str,
) -> None:
    value = engine.start(TOKENS)
    value.commit(repo, "main")
    change(folder)
    other = load(folder, model_cache, dtype=dtype)
    assert other.fingerprint.state_id != engine.fingerprint.state_id
    for attempt in (lambda: other.checkout(repo, "main"), lambda: other.restore(value.snapshot())):
        with pytest.raises(Incompatible) as caught:
            attempt()
        assert caught.value.code == "incompatible.state_identity"
        assert caught.value.data["field"] == field
        assert caught.value.data["have"] != caught.value.data["want"]
        assert field in caught.value.message
    started = other.start(TOKENS, repository=repo)
    assert (started.receipt.tokens_restored, started.receipt.tokens_computed) == (0, 599)
    assert engine.start(TOKENS, repository=repo).receipt.tokens_restored == 512


def test_the_same_files_elsewhere_are_the_same_model(
    engine: TransformersEngine, repo: Repository, folder: Path, model_cache: Path
) -> None:
    engine.start(TOKENS).commit(repo, "main")
    other = load(folder, model_cache)
    assert other.fingerprint == engine.fingerprint
    assert other.checkout(repo, "main").tokens == tuple(TOKENS)


def test_one_name_with_other_weights_is_another_state_identity(tmp_path: Path, model_cache: Path) -> None:
    one = save_model(tmp_path / "one" / "model", decoder_config("llama"), seed=1)
    two = save_model(tmp_path / "two" / "model", decoder_config("llama"), seed=2)
    first, second = load(one, model_cache).fingerprint, load(two, model_cache).fingerprint
    assert first.state_id != second.state_id
    shutil.rmtree(one)
    shutil.copytree(two, one)
    assert load(one, model_cache).fingerprint == second


def test_what_changes_no_state_is_not_in_its_identity(
    engine: TransformersEngine, folder: Path, model_cache: Path
) -> None:
    short = load(folder, model_cache, max_context=100)
    assert short.fingerprint == engine.fingerprint
    edit_config(folder, use_cache=False, eos_token_id=2)
    assert load(folder, model_cache).fingerprint.state == engine.fingerprint.state


# -- weights that change in memory ------------------------------------------------------------------------------------


def dense_layer(model: nn.Module) -> PackedLinear:
    layer = model.model.layers[1].mlp.up_proj  # type: ignore[union-attr, index]
    assert isinstance(layer, PackedLinear)
    return layer


def change_packed_weights(model: nn.Module) -> None:
    dense_layer(model).packed.mul_(1.01)


def pack_other_weights(model: nn.Module) -> None:
    layer = dense_layer(model)
    layer.load(layer.unpacked() * 1.01)


def replace_packed_weights(model: nn.Module) -> None:
    layer = dense_layer(model)
    layer.packed = layer.packed * 1.01


def swap_packed_storage(model: nn.Module) -> None:
    packed = dense_layer(model).packed
    packed.data = packed.data * 1.01


def add_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.add_(0.01)


def load_state_dict(model: nn.Module) -> None:
    state = {name: tensor * 1.01 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def replace_by_name(model: nn.Module) -> None:
    replace_parameters(model, {"model.layers.1.mlp.up_proj.weight": dense_layer(model).unpacked() * 1.01})


def replace_parameter(model: nn.Module) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight * 1.01)


def attach_module(model: nn.Module) -> None:
    model.model.layers[0].mlp.extra = nn.Linear(4, 4)


def attach_parameter(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def attach_bias(model: nn.Module) -> None:
    dense_layer(model).bias = nn.Parameter(torch.zeros(96))


def replace_module(model: nn.Module) -> None:
    old = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = nn.Linear(old.in_features, old.out_features, bias=False)


def remove_module(model: nn.Module) -> None:
    del model.model.layers[2].mlp.act_fn


def change_buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def swap_storage(model: nn.Module) -> None:
    weight = model.model.layers[1].input_layernorm.weight
    weight.data = weight.data * 1.01


CHANGES = [
    change_packed_weights,
    pack_other_weights,
    replace_packed_weights,
    swap_packed_storage,
    add_in_place,
    load_state_dict,
    replace_by_name,
    replace_parameter,
    attach_module,
    attach_parameter,
    attach_bias,
    replace_module,
    remove_module,
    change_buffer,
    swap_storage,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weights_ends_every_use_of_what_they_computed(
    folder: Path, model_cache: Path, repo: Repository, change: Callable[[nn.Module], None]
) -> None:
    engine = load(folder, model_cache)
    engine.start(some_tokens(30)).commit(repo, "before")
    value, session = engine.start(TOKENS), engine.decode_session()
    session.step(3)
    change(model_of(engine))
    for attempt in (
        lambda: value.extend([3]),
        lambda: value.generate(1),
        lambda: next(value.stream(1)),
        lambda: value.logits(),
        lambda: value.score([[3]]),
        lambda: value.snapshot(),
        lambda: value.commit(repo, "main"),
        lambda: value.generate_many([[3], [4]], 1),
        lambda: engine.generate_many([value, value], 1),
        lambda: engine.start([3, 4, 5]),
        lambda: engine.checkout(repo, "before"),
        lambda: session.step(4),
        lambda: session.snapshot(),
    ):
        with pytest.raises(Incompatible) as caught:
            attempt()
        assert caught.value.code == "incompatible.weights"
    assert session.size == 1
    assert_nothing_advertised(repo)


def dense_tensor(model: nn.Module) -> torch.Tensor:
    return dense_layer(model).packed


def norm_tensor(model: nn.Module) -> torch.Tensor:
    return model.model.layers[1].input_layernorm.weight  # type: ignore[no-any-return, union-attr, index]


@pytest.mark.parametrize("write", ["data", "numpy"])
@pytest.mark.parametrize("tensor", [dense_tensor, norm_tensor])
def test_a_write_past_the_version_counters_is_found_at_commit(
    folder: Path, model_cache: Path, repo: Repository, write: str, tensor: Callable[[nn.Module], torch.Tensor]
) -> None:
    engine = load(folder, model_cache)
    engine.start(some_tokens(30)).commit(repo, "before")
    value = engine.start(TOKENS)
    weight = tensor(model_of(engine))
    if write == "data":
        weight.data.add_(0.01)
    else:
        weight.detach().numpy().reshape(-1)[0] += 0.5
    for target in (value, value.extend([3])):
        with pytest.raises(Incompatible) as caught:
            target.commit(repo, "main")
        assert caught.value.code == "incompatible.weights"
    assert_nothing_advertised(repo)


def assert_nothing_advertised(repo: Repository) -> None:
    assert [ref.name.removeprefix("refs/heads/") for ref in repo.branches()] == ["before"]
    assert len(list(repo.catalog.live_manifests())) == 1


# -- weights that are replaced on purpose -----------------------------------------------------------------------------


def test_parameters_are_replaced_only_when_nothing_of_the_old_model_is_alive(
    folder: Path, model_cache: Path, repo: Repository
) -> None:
    engine = load(folder, model_cache)
    old, name = engine.fingerprint, "model.layers.1.mlp.up_proj.weight"
    weight = dict(plain_parameters(model_of(engine)))[name].clone()
    value: Continuation | None = engine.start(TOKENS)
    expected = value.logits()  # type: ignore[union-attr]
    value.commit(repo, "main")  # type: ignore[union-attr]
    with pytest.raises(Conflict) as caught:
        engine.load_parameters({name: weight * 2})
    assert caught.value.code == "conflict.weights"
    assert same_bits(value.logits(), expected)  # type: ignore[union-attr]
    value = None
    engine.load_parameters({name: weight * 2})
    assert engine.fingerprint.state_id != old.state_id
    with pytest.raises(Incompatible) as refused:
        engine.checkout(repo, "main")
    assert refused.value.data["field"] == "parameters"
    assert not same_bits(engine.start(TOKENS).logits(), expected)
    assert engine.start(TOKENS, repository=repo).receipt.tokens_restored == 0
    engine.load_parameters({name: weight})
    assert engine.fingerprint == old
    assert same_bits(engine.checkout(repo, "main").logits(), expected)


def test_a_live_session_too_keeps_the_parameters(folder: Path, model_cache: Path) -> None:
    engine = load(folder, model_cache)
    session = engine.decode_session()
    session.step(3)
    with pytest.raises(Conflict):
        engine.load_parameters({})
    session.close()
    engine.load_parameters({})


def test_parameters_that_do_not_fit_are_refused_whole(folder: Path, model_cache: Path) -> None:
    engine = load(folder, model_cache)
    good = "model.layers.0.mlp.up_proj.weight"
    tensor = dict(plain_parameters(model_of(engine)))[good]
    before = engine.fingerprint
    expected = engine.start(TOKENS[:20]).logits()
    for bad in (
        {"nowhere": torch.zeros(3)},
        {"model.norm.weight": torch.zeros(3)},
        {"model.layers.1.mlp.up_proj.weight": torch.zeros(64, 96)},
        {"model.layers.1.mlp.up_proj.packed": torch.zeros(96, 64)},
    ):
        with pytest.raises(InvalidInput) as caught:
            engine.load_parameters({good: tensor * 2, **bad})
        assert caught.value.code == "invalid_input.parameters"
    assert torch.equal(dict(plain_parameters(model_of(engine)))[good], tensor)
    assert engine.fingerprint == before
    assert same_bits(engine.start(TOKENS[:20]).logits(), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("native", [True, False])
def test_every_parameter_that_is_replaced_reaches_the_next_pass(
    folders: Callable[[str], Path], model_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, native: bool
) -> None:
    """Tied and transposed weights, biases, tables, experts. What holds for the model is measured once, to save time."""
    engine = load(folders(name), model_cache, native=native)
    findings = runtime_of(engine).findings
    monkeypatch.setattr(runtime_module, "measure", lambda *_: findings)
    monkeypatch.setattr(FindingsCache, "put", lambda *_: None)
    plain = {each: tensor.clone() for each, tensor in plain_parameters(model_of(engine))}
    before = engine.fingerprint
    expected = engine.start(TOKENS[:20]).logits()
    for each in plain:
        if "inv_freq" in each or ".0." in each or ".2." in each:  # one layer stands for all
            continue
        added = torch.arange(plain[each].numel()).sin().view(plain[each].shape) / 8
        engine.load_parameters({each: plain[each] * 1.25 + added})
        assert not same_bits(engine.start(TOKENS[:20]).logits(), expected), each
        engine.load_parameters({each: plain[each]})
        assert same_bits(engine.start(TOKENS[:20]).logits(), expected), each
    assert engine.fingerprint == before


def test_names_and_digest_of_parameters_are_those_before_modules_were_replaced(folder: Path, model_cache: Path) -> None:
    engine = load(folder, model_cache)
    stored = load_file(folder / "model.safetensors")
    plain = dict(plain_parameters(model_of(engine)))
    assert set(stored) <= set(plain)
    assert all(torch.equal(plain[name], tensor) for name, tensor in stored.items())


# -- the handle -------------------------------------------------------------------------------------------------------


def test_continuations_and_sessions_outlive_the_handle(folder: Path, model_cache: Path, repo: Repository) -> None:
    engine = load(folder, model_cache)
    value, session = engine.start(some_tokens(30)), engine.decode_session()
    expected = value.generate(4).tokens
    engine.close()
    engine.close()
    assert value.generate(4).tokens == expected
    assert session.step(3).shape == (320,)
    value.commit(repo, "main")
    for attempt in (
        lambda: engine.start("x"),
        lambda: engine.decode_session(),
        lambda: engine.checkout(repo, "main"),
        lambda: engine.stats(),
        lambda: engine.fingerprint,
    ):
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert caught.value.code == "invalid_input.closed"


# -- the cache of digests ---------------------------------------------------------------------------------------------


def test_weights_are_hashed_once_and_again_when_their_file_is_rewritten(folder: Path, tmp_path: Path) -> None:
    def notes(dtype: str = "float32") -> list[str]:
        said: list[str] = []
        load(folder, tmp_path / "cache", dtype=dtype, note=said.append)
        return [text for text in said if text.startswith("hashing")]

    assert len(notes()) == 1
    assert notes() == []
    assert len(notes("bfloat16")) == 1
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert len(notes()) == 1
    perturb_weight(folder)
    assert len(notes()) == 1
    assert notes() == []


def test_a_cached_digest_is_the_digest(folder: Path, tmp_path: Path) -> None:
    fresh, cached = load(folder, tmp_path / "a"), load(folder, tmp_path / "a")
    assert fresh.fingerprint == cached.fingerprint == load(folder, tmp_path / "b").fingerprint


@pytest.mark.parametrize("torn", [b"b3:torn", b"", b"\xff\x00"])
def test_a_torn_cache_file_is_a_miss(folder: Path, tmp_path: Path, torn: bytes) -> None:
    expected = load(folder, tmp_path / "cache").fingerprint
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"digests", "selftests"}
    for path in files:
        path.write_bytes(torn)
    assert load(folder, tmp_path / "cache").fingerprint == expected


def test_a_cache_that_cannot_be_written_costs_time_only(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert load(folder, tmp_path / "cache").start([3, 4]).position == 1
