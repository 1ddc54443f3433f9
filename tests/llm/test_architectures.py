"""Our rows path against the plain transformers model, for every architecture; and what cannot be continued exactly is refused at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from tests.llm.models import (
    ARCHITECTURES,
    TEMPLATE,
    decoder_config,
    gemma4_config,
    load,
    make_tokenizer,
    save_model,
    some_tokens,
)
from transformers import AutoModelForCausalLM

from forkpoint.errors import Incompatible, InvalidInput, NotFound, Unavailable
from forkpoint.llm import Sampling, TransformersEngine

pytestmark = pytest.mark.model

TOLERANCE = 1e-3
"""Largest difference of a float32 logit; logits of these models reach 10, and transformers' own are up to 4e-4 off the exact ones."""

EXPERTS = ("gpt_oss", "mixtral", "deepseek_v3")
"""Models whose roundings decide which experts see a token, so that in half precision no tolerance holds."""


def oracle(folder: Path, dtype: str) -> Any:
    """The model as transformers runs it, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    ).eval()


def plain_logits(folder: Path, dtype: str, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return oracle(folder, dtype)(torch.tensor([tokens])).logits[0].double().numpy()  # type: ignore[no-any-return]


def all_logits(engine: TransformersEngine, tokens: list[int], pieces: list[int]) -> np.ndarray:
    """Logits after every token, appended in pieces; a piece's own rows come from an evaluation that keeps nothing."""
    runtime = engine._open()
    state, rows, start = runtime.strategy.empty(), [], 0
    for size in pieces:
        piece = tokens[start : start + size]
        rows.append(runtime.evaluate(state, [piece])[0])
        if size == 1:
            state, logits = runtime.step(state, piece[0])
            rows[-1] = logits[None]
        else:
            state = runtime.advance(state, piece)
        start += size
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ARCHITECTURES
        for dtype in ("float32", "bfloat16", "float16")
        if dtype == "float32" or name not in EXPERTS
    ],
)
def test_logits_equal_those_of_the_plain_model(
    folders: Callable[[str], Path], engines: Callable[..., TransformersEngine], name: str, dtype: str
) -> None:
    pieces = [30, 1, 1, 20, 1, 3, 4] if name == "gpt2" else [200, 100, 1, 1, 213, 1, 1, 2, 1]
    tokens = some_tokens(sum(pieces))
    ours = all_logits(engines(name, dtype), tokens, pieces)
    exact, theirs = (plain_logits(folders(name), each, tokens) for each in ("float64", dtype))
    assert np.abs(exact).max() > 1.0
    assert np.square(ours - exact).mean() < 1.5 * np.square(theirs - exact).mean()
    if dtype == "float32":
        assert np.abs(ours - exact).max() < TOLERANCE


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt2"])
def test_every_architecture_goes_on_exactly_from_a_restored_state(
    engines: Callable[..., TransformersEngine], name: str
) -> None:
    engine = engines(name, "bfloat16")
    value = engine.start(some_tokens(270), sampling=Sampling(temperature=0.7, seed=1, logit_bias=((1, -100.0),)))
    again = engine.restore(value.snapshot())
    assert again.id == value.id
    one, two = list(value.extend([5, 6, 7]).stream(6)), list(again.extend([5, 6, 7]).stream(6))
    assert [(item.choice, item.logits.tobytes()) for item in one if item.logits is not None] == [
        (item.choice, item.logits.tobytes()) for item in two if item.logits is not None
    ]


@pytest.mark.parametrize("name", EXPERTS)
def test_padding_rows_do_not_matter_to_experts(
    folders: Callable[[str], Path], engines: Callable[..., TransformersEngine], name: str
) -> None:
    value = engines(name).start(some_tokens(40))
    theirs = plain_logits(folders(name), "float32", some_tokens(40))[-1]
    assert np.abs(value.logits() - theirs).max() < TOLERANCE


def test_keys_and_values_of_different_sizes_are_kept_each_in_its_own(
    engines: Callable[..., TransformersEngine],
) -> None:
    (group,) = engines("deepseek_v3").groups
    assert (group.num_heads, group.key_dim, group.value_dim) == (4, 24, 16)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "names"),
    [
        ("mamba", {"state_size": 16}, "Layer"),
        ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}, "Layer"),
        (
            "qwen3_5_text",
            {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "Layer",
        ),
        (
            "llama4_text",
            {
                "attention_chunk_size": 32,
                "num_local_experts": 2,
                "intermediate_size_mlp": 64,
                "num_experts_per_tok": 1,
            },
            "chunked_attention",
        ),
        ("bloom", {"n_layer": 2, "n_head": 4}, "not keys and values"),
    ],
)
def test_a_model_whose_state_cannot_be_kept_exactly_is_refused_by_name(
    tmp_path: Path, model_cache: Path, kind: str, changes: dict[str, object], names: str
) -> None:
    folder = save_model(tmp_path / kind, decoder_config(kind, **changes))
    with pytest.raises(Incompatible) as caught:
        load(folder, model_cache)
    assert caught.value.code == "incompatible.architecture"
    assert names in caught.value.message


def test_layers_that_read_the_keys_of_others_are_refused_by_name(tmp_path: Path, model_cache: Path) -> None:
    folder = save_model(tmp_path / "shared", gemma4_config(num_kv_shared_layers=2))
    with pytest.raises(Incompatible, match="layer 2 keeps its state in a DummyLayer"):
        load(folder, model_cache)


def test_pickled_weights_are_refused(tmp_path: Path, model_cache: Path) -> None:
    folder = tmp_path / "pickled"
    config = decoder_config("llama")
    config.save_pretrained(folder)
    make_tokenizer(template=TEMPLATE).save_pretrained(folder)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidInput) as caught:
        load(folder, model_cache)
    assert caught.value.code == "invalid_input.weights"
    assert "pytorch_model.bin" in str(caught.value.data["file"])


def test_places_that_hold_no_model_are_told_apart(tmp_path: Path, model_cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("no model")
    for source, error, code in (
        (tmp_path / "missing", NotFound, "not_found.model"),
        (tmp_path / "empty", NotFound, "not_found.model"),
        (tmp_path / "file.txt", InvalidInput, "invalid_input.model"),
    ):
        with pytest.raises(error) as caught:
            load(source, model_cache)
        assert caught.value.code == code


def test_a_folder_that_cannot_be_loaded_is_a_typed_error(tmp_path: Path, model_cache: Path) -> None:
    folder = save_model(tmp_path / "torn", decoder_config("llama"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises((InvalidInput, Unavailable)):
        load(folder, model_cache)
    (folder / "config.json").write_text("{")
    with pytest.raises((InvalidInput, Unavailable)):
        load(folder, model_cache)


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path, model_cache: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "partial", decoder_config("llama"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match="up_proj"):
        load(folder, model_cache)


def test_unknown_dtypes_threads_and_contexts_are_refused(folders: Callable[[str], Path], model_cache: Path) -> None:
    folder = folders("llama")
    for options, code in (
        ({"dtype": "int8"}, "invalid_input.dtype"),
        ({"max_context": 1}, "invalid_input.max_context"),
        ({"max_context": 1 << 20}, "invalid_input.max_context"),
    ):
        with pytest.raises(InvalidInput) as caught:
            load(folder, model_cache, **options)  # type: ignore[arg-type]
        assert caught.value.code == code
    with pytest.raises(InvalidInput) as caught:
        TransformersEngine.load(str(folder), threads=0)
    assert caught.value.code == "invalid_input.threads"


def test_a_hub_id_offline_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, model_cache: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable) as caught:
        load("nobody-at-all/no-such-model", model_cache)
    assert (caught.value.code, caught.value.data["model"]) == ("unavailable.model", "nobody-at-all/no-such-model")


def test_code_that_ships_with_a_model_is_not_run(tmp_path: Path, model_cache: Path) -> None:
    import json

    folder = save_model(tmp_path / "custom", decoder_config("llama"))
    ran = tmp_path / "ran"
    (folder / "modeling_custom.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nclass Custom: pass\nclass Config: pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "custom",
        "auto_map": {"AutoModelForCausalLM": "modeling_custom.Custom", "AutoConfig": "modeling_custom.Config"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput) as caught:
        load(folder, model_cache)
    assert caught.value.code == "invalid_input.model"
    assert not ran.exists()
