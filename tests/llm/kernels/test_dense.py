"""The packed product: one order of every sum, whatever rows, threads, tiles and instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels import dense
from forkpoint.llm.kernels.dense import in_blocks, pack, packed_elements, packed_embedding, packed_linear, unpack
from forkpoint.llm.kernels.native import find_native

NATIVE = find_native()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the native kernels were not built")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((1, 1), (5, 3), (17, 33), (100, 77), (192, 576), (64, 1537))
"""Outputs and inputs, odd ones among them."""
COUNTS = (*range(1, 34), 64, 256)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def instructions(name: str) -> Iterator[None]:
    assert NATIVE is not None
    before = NATIVE.instruction_set()
    try:
        NATIVE.use_instruction_set(name)
    except ValueError:
        pytest.skip(f"this processor has no {name}")
    try:
        yield
    finally:
        NATIVE.use_instruction_set(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_unpacking_gives_the_plain_weights_back_bit_for_bit(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = some(outputs, inputs, dtype=dtype)
    weight.view(-1)[0] = float("nan")
    packed = pack(weight)
    assert packed.numel() == packed_elements(inputs, outputs, dtype)
    assert torch.equal(bits(unpack(packed, inputs, outputs)), bits(weight))
    assert torch.equal(bits(dense._pack_with_torch(weight)), bits(packed))
    assert torch.equal(bits(dense._unpack_with_torch(packed, inputs, outputs)), bits(weight))


@needs_native
def test_sizes_of_the_packed_form_are_the_same_on_both_sides() -> None:
    assert NATIVE is not None
    for code, dtype in enumerate(DTYPES):
        for outputs, inputs in SIZES:
            assert NATIVE.packed_elements(inputs, outputs, code) == packed_elements(inputs, outputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_has_the_same_bits_whatever_rows_and_threads_there_are(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    packed, bias = pack(some(outputs, inputs, dtype=dtype)), some(outputs, dtype=dtype, seed=1)
    rows = some(256, inputs, dtype=dtype, seed=2)
    alone = packed_linear(rows, packed, bias, outputs)
    for count in COUNTS if find_native() else (1, 7, 33):
        assert torch.equal(bits(packed_linear(rows[:count], packed, bias, outputs)), bits(alone[:count])), count
    with threads(2):
        for count in (1, 3, 8, 33, 256):
            last = packed_linear(rows[-count:], packed, bias, outputs)
            assert torch.equal(bits(last), bits(alone[-count:])), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_results_are_within_the_bound_of_sums_in_float32(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias, rows = some(outputs, inputs, dtype=dtype), some(outputs, dtype=dtype), some(9, inputs, dtype=dtype)
    out = packed_linear(rows, pack(weight), bias, outputs).double()
    exact = rows.double() @ weight.double().T + bias.double()
    size = rows.double().abs() @ weight.double().abs().T + bias.double().abs()
    step = 2.0**-24
    bound = (inputs + 2) * step * size
    if dtype != torch.float32:
        bound = bound + exact.abs() * torch.finfo(dtype).eps / 2 * (1 + step) + torch.finfo(dtype).tiny
    assert bool(((out - exact).abs() <= bound * 1.001).all())


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["avx512_bf16", "avx512", "avx2", "portable"])
def test_every_instruction_set_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    for outputs, inputs in ((17, 33), (100, 77), (64, 577)):
        packed, bias = pack(some(outputs, inputs, dtype=dtype)), some(outputs, dtype=dtype, seed=1)
        rows = some(19, inputs, dtype=dtype, seed=2)
        expected = packed_linear(rows, packed, bias, outputs)
        with instructions(name):
            assert torch.equal(bits(packed_linear(rows, packed, bias, outputs)), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_apart_in_memory_count_as_they_are(dtype: torch.dtype) -> None:
    packed, wide = pack(some(20, 33, dtype=dtype)), some(6, 50, dtype=dtype)
    expected = packed_linear(wide[:, :33].contiguous(), packed, None, 20)
    assert torch.equal(packed_linear(wide[:, :33], packed, None, 20), expected)
    assert torch.equal(packed_linear(wide[:, :33].reshape(2, 3, 33), packed, None, 20).view(6, 20), expected)
    assert packed_linear(wide[:0, :33], packed, None, 20).shape == (0, 20)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_reads_the_rows_of_the_plain_weights(dtype: torch.dtype) -> None:
    weight, ids = some(37, 21, dtype=dtype), torch.tensor([[0, 36, 5], [5, 16, 15]])
    packed = pack(weight)
    assert torch.equal(bits(packed_embedding(ids, packed, 37, 21)), bits(weight[ids]))
    assert torch.equal(bits(dense._embedding_with_torch(ids, packed, 37, 21)), bits(weight[ids]))


def test_what_does_not_fit_is_refused_before_memory_is_read() -> None:
    packed = pack(some(20, 33, dtype=torch.float32))
    with pytest.raises(InvalidInput) as refused:
        packed_linear(torch.zeros(2, 34), packed, None, 20)
    assert refused.value.code == "invalid_input.packed"
    with pytest.raises(InvalidInput):
        packed_linear(torch.zeros(2, 33, dtype=torch.bfloat16), packed, None, 20)
    with pytest.raises(InvalidInput):
        pack(torch.zeros(3, 3, dtype=torch.int8))
    with pytest.raises(InvalidInput):
        unpack(packed, 32, 33)
    for x in (torch.zeros(2, 33, dtype=torch.float64), torch.zeros(2, 0), torch.tensor(0.0)):
        with pytest.raises(InvalidInput):
            packed_linear(x, packed.to(x.dtype) if x.numel() else packed[:0], None, 20)
    for embed in (packed_embedding, dense._embedding_with_torch):
        for ids in (torch.tensor([20]), torch.tensor([-1]), torch.tensor([0.5])):
            with pytest.raises(InvalidInput) as outside:
                embed(ids, packed, 20, 33)
            assert outside.value.code == "invalid_input.tokens"
    if find_native():
        with pytest.raises(InvalidInput):
            packed_linear(torch.zeros(2, 33), packed, torch.zeros(19), 20)


def test_packing_into_a_tensor_counts_as_a_change_of_it() -> None:
    packed = pack(some(20, 33, dtype=torch.float32))
    before = packed._version
    pack(some(20, 33, dtype=torch.float32, seed=4), packed)
    assert packed._version > before
    assert torch.equal(unpack(packed, 33, 20), some(20, 33, dtype=torch.float32, seed=4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_torch_version_is_close_and_does_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    packed, bias, rows = pack(some(48, 64, dtype=dtype)), some(48, dtype=dtype), some(40, 64, dtype=dtype)
    whole = dense._linear_with_torch(rows, packed, bias, 48)
    for count in (1, 2, 3, 7, 8, 9, 33):
        assert torch.equal(dense._linear_with_torch(rows[:count], packed, bias, 48), whole[:count])
    torch.testing.assert_close(whole, packed_linear(rows, packed, bias, 48))


def test_blocks_have_one_number_of_rows_and_padding_is_cut_off() -> None:
    seen: list[int] = []

    def double(block: Tensor) -> Tensor:
        seen.append(len(block))
        return block * 2

    rows = some(19, 3, dtype=torch.float32)
    assert torch.equal(in_blocks(double, rows, 8), rows * 2)
    assert seen == [8, 8, 8]
    assert in_blocks(double, rows[:0], 8).shape == (0, 3)


def test_shapes_are_known_without_memory() -> None:
    packed = torch.empty(packed_elements(33, 20, torch.float32), device="meta")
    assert packed_linear(torch.empty(2, 5, 33, device="meta"), packed, None, 20).shape == (2, 5, 20)
    ids = torch.empty(4, dtype=torch.int64, device="meta")
    assert packed_embedding(ids, packed, 20, 33).shape == (4, 33)
