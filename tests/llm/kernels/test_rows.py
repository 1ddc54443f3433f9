"""Norms and activations row by row: close to torch, the same bits on every instruction set and whatever rows there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.llm.kernels.test_dense import DTYPES, NATIVE, bits, instructions, needs_native, some, threads
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.native import find_native
from forkpoint.llm.kernels.rows import ACTIVATIONS, activation, activation_product, layer_norm, rms_norm

DIMS = (1, 5, 16, 33, 576)


def exact_rms(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * (offset + weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("offset", "rounds_once"), [(0.0, False), (0.0, True), (1.0, True)])
def test_root_mean_square_norms_are_close_to_the_exact_ones(
    dim: int, dtype: torch.dtype, offset: float, rounds_once: bool
) -> None:
    x, weight = some(7, dim, dtype=dtype), some(dim, dtype=dtype, seed=1)
    out, exact = rms_norm(x, weight, 1e-5, offset, rounds_once), exact_rms(x, weight, 1e-5, offset)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=(1.1 if rounds_once else 2.1) * step, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_llama_rounds_before_it_multiplies(dtype: torch.dtype) -> None:
    x, weight = some(64, 576, dtype=dtype), some(576, dtype=dtype, seed=1)
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    differ = (rms_norm(x, weight, 1e-5) != weight * normal).float().mean()
    assert differ < 1e-3
    assert (rms_norm(x, weight, 1e-5, 0.0, True) != weight * normal).float().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_layer_norms_are_close_to_torch(dim: int, dtype: torch.dtype) -> None:
    x, weight, bias = some(7, dim, dtype=dtype), some(dim, dtype=dtype, seed=1), some(dim, dtype=dtype, seed=2)
    for scale, shift in ((weight, bias), (weight, None), (None, None)):
        exact = F.layer_norm(
            x.double(),
            (dim,),
            None if scale is None else scale.double(),
            None if shift is None else shift.double(),
            1e-5,
        )
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(layer_norm(x, scale, shift, 1e-5).double(), exact, rtol=1.1 * step, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_close_to_the_exact_ones(kind: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-20, 20, 4001).to(dtype)[None]
    out, exact = activation(x, kind).double(), ACTIVATIONS[kind](x.double())
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out, exact, rtol=max(0.51 * step, 3e-6), atol=1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_pass_on_what_is_not_a_number(kind: str) -> None:
    out = activation(torch.tensor([[float("nan"), 0.0, float("inf")]]), kind)
    assert bool(out[0, 0].isnan())
    assert not bool(out[0, 1:].isnan().any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_gate_is_rounded_before_it_multiplies(kind: str, dtype: torch.dtype) -> None:
    gate, up = some(5, 77, dtype=dtype), some(5, 77, dtype=dtype, seed=1)
    assert torch.equal(activation_product(gate, up, kind), activation(gate, kind) * up)


def run_all(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    return [
        rms_norm(x, weight, 1e-5),
        rms_norm(x, weight, 1e-5, 1.0),
        rms_norm(x, None, 1e-5),
        layer_norm(x, weight, bias, 1e-5),
        *(activation(x * 4, kind) for kind in ACTIVATIONS),
        *(activation_product(x * 4, x, kind) for kind in ACTIVATIONS),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [33, 576])
def test_a_row_has_the_same_bits_whatever_rows_and_threads_there_are(dim: int, dtype: torch.dtype) -> None:
    if find_native() is None:
        pytest.skip("torch's elementwise operations are taken as they are")
    x, weight, bias = some(33, dim, dtype=dtype), some(dim, dtype=dtype, seed=1), some(dim, dtype=dtype, seed=2)
    whole = run_all(x, weight, bias)
    for count in (1, 2, 3, 5):
        with threads(count % 2 + 1):
            for part, all_rows in zip(run_all(x[-count:], weight, bias), whole, strict=True):
                assert torch.equal(bits(part), bits(all_rows[-count:]))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["avx512_bf16", "avx512", "avx2", "portable"])
def test_every_instruction_set_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    x, weight, bias = some(9, 77, dtype=dtype), some(77, dtype=dtype, seed=1), some(77, dtype=dtype, seed=2)
    expected = run_all(x, weight, bias)
    with instructions(name):
        for have, want in zip(run_all(x, weight, bias), expected, strict=True):
            assert torch.equal(bits(have), bits(want))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 6, 34])
def test_rotation_rounds_as_torch_does(rotary_dim: int, dtype: torch.dtype) -> None:
    assert NATIVE is not None
    rows, heads, dim = 5, 3, 40
    x, table = some(rows, heads, dim, dtype=dtype), some(2, 50, rotary_dim, dtype=dtype, seed=1)
    positions = torch.tensor([0, 49, 7, 7, 30])
    cos, sin = table[0][positions][:, None], table[1][positions][:, None]
    first, second = x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
    turned = torch.cat([-second, first], -1)
    expected = torch.cat([x[..., :rotary_dim] * cos + turned * sin, x[..., rotary_dim:]], -1)
    in_place = x.clone()
    for source, out in ((x, torch.empty_like(x)), (in_place, in_place)):
        NATIVE.rotary(
            source.data_ptr(), heads * dim, heads, dim, rotary_dim, table[0].data_ptr(), table[1].data_ptr(),
            positions.data_ptr(), out.data_ptr(), heads * dim, rows, DTYPES.index(dtype), 2,
        )  # fmt: skip
        assert torch.equal(bits(out), bits(expected))


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        activation(torch.zeros(2, 3), "magic")
    assert refused.value.code == "invalid_input.activation"
    if find_native():
        with pytest.raises(InvalidInput):
            rms_norm(torch.zeros(2, 3), torch.zeros(4), 1e-5)


def test_shapes_are_known_without_memory() -> None:
    x, weight = torch.empty(2, 5, 33, device="meta"), torch.empty(33, device="meta")
    for out in (rms_norm(x, weight, 1e-5), layer_norm(x, weight, None, 1e-5), activation(x, "silu")):
        assert out.shape == x.shape
