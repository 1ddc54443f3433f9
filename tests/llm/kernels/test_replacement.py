"""Replaced modules compute what the originals did, invariantly, with weights that exist once and keep their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.llm.models import ARCHITECTURES, make_model
from torch import Tensor, nn

from forkpoint.errors import Incompatible, InvalidInput
from forkpoint.llm.engines import replacement
from forkpoint.llm.engines.plain import held_tensors, plain_parameters
from forkpoint.llm.engines.replacement import replace_modules
from forkpoint.llm.engines.weights import WeightsWatch, digest_parameters, replace_parameters
from forkpoint.llm.kernels.linear import BlockedLinear, PackedLinear
from forkpoint.llm.kernels.native import find_native

pytestmark = pytest.mark.filterwarnings("ignore")
needs_native = pytest.mark.skipif(find_native() is None, reason="the native kernels were not built")
SOME = ("llama", "gpt2", "gemma3", "qwen3", "mixtral", "gpt_oss", "deepseek_v3")
TOKENS = torch.arange(2, 40)[None]


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return make_model(ARCHITECTURES[name]()).to(dtype).requires_grad_(False)


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(tokens).logits
    return out


@pytest.mark.parametrize("name", SOME)
def test_logits_stay_close_to_the_original(name: str) -> None:
    model = make(name)
    before = logits(model)
    report = replace_modules(model)
    assert report.counts()
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_names_digest_and_values_of_parameters_stay_the_same(name: str) -> None:
    model = make(name, torch.bfloat16)
    digest, before = digest_parameters(model), {**dict(model.named_parameters()), **dict(model.named_buffers())}
    copies = {each: tensor.clone() for each, tensor in before.items()}
    replace_modules(model)
    after = dict(plain_parameters(model))
    assert list(after) == sorted(copies)
    assert all(torch.equal(after[each], copies[each]) for each in copies)
    assert digest_parameters(model) == digest


@needs_native
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_weights_exist_once(name: str) -> None:
    model = make(name)
    plain_bytes = sum(held.nbytes for held in held_tensors(model))
    replace_modules(model)
    held_bytes = sum({id(each): each.nbytes for each in (*model.parameters(), *model.buffers())}.values())
    assert plain_bytes <= held_bytes <= plain_bytes * 1.02
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    tied = model.config.tie_word_embeddings
    assert (getattr(model.get_input_embeddings(), "packed", None) is model.get_output_embeddings().packed) == tied


@pytest.mark.parametrize("name", SOME)
def test_a_second_run_changes_nothing(name: str) -> None:
    model = make(name)
    first = replace_modules(model)
    modules = [id(module) for module in model.modules()]
    assert replace_modules(model) == first
    assert [id(module) for module in model.modules()] == modules


@needs_native
def test_a_change_in_place_of_packed_weights_is_noticed() -> None:
    model = make("llama")
    replace_modules(model)
    watch = WeightsWatch(model)
    watch.check()
    model.model.layers[1].mlp.up_proj.packed.mul_(2)
    with pytest.raises(Incompatible) as caught:
        watch.check()
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_parameters_are_replaced_by_their_original_names(name: str) -> None:
    model, other = make(name), make_model(ARCHITECTURES[name](), seed=1).requires_grad_(False)
    wanted = logits(other)
    replace_modules(model)
    watch = WeightsWatch(model)
    replace_parameters(model, dict(other.named_parameters()))
    assert digest_parameters(model) == digest_parameters(other)
    torch.testing.assert_close(logits(model), wanted, rtol=1e-3, atol=1e-4)
    with pytest.raises(Incompatible):
        watch.check()


def test_parameters_that_do_not_fit_are_refused_whole() -> None:
    model = make("gpt2")
    replace_modules(model)
    before = digest_parameters(model)
    good = "transformer.h.0.mlp.c_fc.weight"
    value = dict(plain_parameters(model))[good] * 2
    for bad in ({"nowhere": torch.zeros(3)}, {"transformer.h.1.mlp.c_fc.weight": value.t()}):
        with pytest.raises(InvalidInput) as caught:
            replace_parameters(model, {good: value, **bad})
        assert caught.value.code == "invalid_input.parameters"
    assert digest_parameters(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_mixture_does_not_depend_on_the_rows_its_experts_see(dtype: torch.dtype) -> None:
    for name, block in (("mixtral", "mlp"), ("gpt_oss", "mlp")):
        model = make(name, dtype)
        replace_modules(model)
        layer = getattr(model.model.layers[0], block)
        rows = torch.randn(1, 33, 64, generator=torch.Generator().manual_seed(0)).to(dtype)

        def run(part: Tensor, layer: Any = layer) -> Tensor:
            out = layer(part)
            return out[0] if isinstance(out, tuple) else out

        whole = run(rows).view(33, 64)
        for count in (1, 2, 3, 5, 8, 17):
            assert torch.equal(run(rows[:, -count:]).view(count, 64), whole[-count:]), (name, count)


def test_layers_of_other_kinds_run_in_blocks_and_keep_their_names() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(Odd(24, 40), nn.SiLU())
    names = [name for name, _ in model.named_parameters()]
    digest = digest_parameters(model)
    rows = torch.randn(19, 24)
    with torch.no_grad():
        before = model(rows)
        assert replace_modules(model).replaced == {"0": "BlockedLinear", "1": "RowActivation"}
        assert isinstance(model[0], BlockedLinear)
        torch.testing.assert_close(model(rows), before)
        for count in (1, 2, 3, 9):
            assert torch.equal(model(rows[:count]), model(rows)[:count])
    assert [name for name, _ in plain_parameters(model)] == sorted(names)
    assert digest_parameters(model) == digest


def test_norms_that_compute_something_else_are_left_alone_with_the_reason() -> None:
    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(24), requires_grad=False), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight / (x.abs().mean(-1, keepdim=True) + self.eps)

    model = nn.Sequential(OtherRMSNorm())
    report = replace_modules(model)
    assert not report.replaced
    assert "something else" in report.left["0"]


def test_without_compiled_kernels_layers_run_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "find_native", lambda: None)
    model = make("llama")
    before = logits(model)
    counts = replace_modules(model).counts()
    assert counts["BlockedLinear"] == 22
    assert "PackedLinear" not in counts
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)


@needs_native
def test_a_packed_layer_shows_its_sizes_and_gives_its_plain_weights_back() -> None:
    weight = torch.randn(24, 40)
    layer = PackedLinear.of(weight, is_transposed=True)
    assert (layer.in_features, layer.out_features) == (24, 40)
    assert torch.equal(layer.unpacked(), weight)
    assert not hasattr(layer, "weight")
