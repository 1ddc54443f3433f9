"""Attention over pages: close to float64, and equal bits however a row is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.llm.kernels.lanes import Piece, Shape, Tokens, alone, random_tokens, run, with_pages

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.attention import append_and_attend
from forkpoint.llm.kernels.call import Call
from forkpoint.llm.kernels.native import find_native
from forkpoint.llm.kernels.portable_attention import append_and_attend_with_torch
from forkpoint.llm.kernels.reference import attend_exactly, attend_in_order, error_bound
from forkpoint.llm.kernels.variant import Variant

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SINKS = torch.linspace(-1, 2, 12)

SHAPES = {
    "grouped by three": Shape(query_heads=9, heads=3, key_dim=64, value_dim=64),
    "one query head a key head, odd sizes": Shape(query_heads=3, heads=3, key_dim=24, value_dim=20),
    "grouped by eight, values wider": Shape(query_heads=8, heads=1, key_dim=80, value_dim=96),
    "grouped by four, window": Shape(query_heads=8, heads=2, variant=Variant(scaling=0.2, window=100)),
    "sinks": Shape(query_heads=12, heads=4, variant=Variant(scaling=0.2, sinks=SINKS)),
    "softcap": Shape(query_heads=5, heads=5, key_dim=40, variant=Variant(scaling=0.4, softcap=5.0)),
    "window, sinks, softcap": Shape(
        query_heads=12, heads=3, variant=Variant(scaling=0.3, window=33, softcap=3.0, sinks=SINKS)
    ),
    "negative scaling, more query heads than a tile": Shape(
        query_heads=16, heads=1, key_dim=16, value_dim=128, variant=Variant(scaling=-0.3)
    ),
}

native_only = pytest.mark.skipif(find_native() is None, reason="no native kernels here")


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_within_the_stated_bound_of_float64(shape: Shape, dtype: torch.dtype) -> None:
    shape = replace(shape, dtype=dtype)
    tokens = random_tokens(shape, 530)
    rows = [0, 1, 15, 16, 100, 254, 255, 256, 257, 511, 512, 529]
    exact = attend_exactly(tokens.query[rows], tokens.key, tokens.value, rows, shape.variant)
    products = tokens.query.abs().amax(dim=(0, 1)).double() @ tokens.key.abs().amax(dim=(0, 1)).double()
    bound = error_bound(
        dtype, key_dim=shape.key_dim, num_tokens=530, largest_logit=float(products) * abs(shape.variant.scaling),
        largest_value=float(tokens.value.abs().max()),
    )  # fmt: skip
    error = (alone(shape, tokens)[rows].double() - exact).abs().max()
    assert error <= bound
    assert bound < {torch.float32: 0.02, torch.bfloat16: 0.05, torch.float16: 0.03}[dtype]  # else it would say nothing


@native_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_readable_version_has_the_same_bits(shape: Shape, dtype: torch.dtype) -> None:
    shape = replace(shape, dtype=dtype)
    tokens = random_tokens(shape, 300)
    rows = [0, 17, 255, 256, 299]
    readable = attend_in_order(tokens.query[rows], tokens.key, tokens.value, rows, shape.variant)
    differing = (alone(shape, tokens)[rows] != readable).double().mean()
    assert differing < 0.002  # the readable version's multiply-add is not truly fused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pieces", [1, 7, 16, 31, 256])
def test_a_row_does_not_depend_on_how_many_rows_a_pass_has(shape: Shape, dtype: torch.dtype, pieces: int) -> None:
    shape = replace(shape, dtype=dtype)
    tokens = random_tokens(shape, 290 if pieces == 1 else 550)
    assert torch.equal(alone(shape, tokens, pieces=pieces), alone(shape, tokens))


@pytest.mark.parametrize("page_tokens", [32, 64, 256, 48, 1024])
def test_a_row_does_not_depend_on_the_size_of_pages(shape: Shape, page_tokens: int) -> None:
    tokens = random_tokens(shape, 600)
    expected = alone(shape, tokens, pieces=200)
    assert torch.equal(alone(with_pages(shape, page_tokens), tokens, pieces=200), expected)
    assert torch.equal(alone(with_pages(shape, page_tokens), tokens, pieces=9), expected)


@pytest.mark.parametrize("pieces", [3, 100])
def test_a_row_does_not_depend_on_where_pages_lie(shape: Shape, pieces: int) -> None:
    tokens = random_tokens(shape, 400)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))[: shape.num_pages(400)].tolist()
    assert torch.equal(alone(shape, tokens, pieces=pieces, order=order), alone(shape, tokens))


@pytest.mark.parametrize("pieces", [1, 150])
def test_a_row_does_not_depend_on_the_number_of_threads(shape: Shape, pieces: int) -> None:
    tokens = random_tokens(shape, 300)
    expected = alone(shape, tokens, pieces=pieces)
    torch.set_num_threads(2)
    assert torch.equal(alone(shape, tokens, pieces=pieces), expected)


@native_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_has_the_same_bits(shape: Shape, dtype: torch.dtype) -> None:
    native = find_native()
    assert native is not None
    shape = replace(shape, dtype=dtype)
    tokens = random_tokens(shape, 285)
    expected, before = alone(shape, tokens)[240:], native.instruction_set()
    try:
        for name in ("portable", "avx2", "avx512"):
            pages, table = shape.arena(18), range(18)
            run(shape, pages, [Piece(tokens=tokens[:240], position=0, table=table)])
            try:
                native.use_instruction_set(name)
            except ValueError:
                break  # this processor has no more
            many = run(shape, pages, [Piece(tokens=tokens[240:275], position=240, table=table)])[0]
            few = run(shape, pages, [Piece(tokens=tokens[275:], position=275, table=table)])[0]
            assert torch.equal(torch.cat([many, few]), expected), name
            native.use_instruction_set(before)
    finally:
        native.use_instruction_set(before)


@pytest.mark.parametrize("garbage", [0.0, float("inf"), -float("inf"), 1e30])
def test_what_lies_in_unwritten_memory_changes_nothing(shape: Shape, garbage: float) -> None:
    tokens = random_tokens(shape, 270)
    piece = Piece(tokens=tokens, position=0, table=range(shape.num_pages(270)))
    assert torch.equal(run(shape, shape.arena(40, garbage=garbage), [piece])[0], alone(shape, tokens))


@native_only
@pytest.mark.parametrize("pieces", [1, 20, 270])
def test_keys_and_values_that_a_row_does_not_see_cannot_reach_it(shape: Shape, pieces: int) -> None:
    tokens = random_tokens(shape, 270)
    poisoned = Tokens(query=tokens.query, key=tokens.key.clone(), value=tokens.value.clone())
    poisoned.key[201:], poisoned.value[201:] = float("nan"), float("inf")
    seen, expected = alone(shape, poisoned, pieces=pieces), alone(shape, tokens)
    assert torch.equal(seen[:201], expected[:201])
    assert not torch.isfinite(seen[201:]).any()  # and those that see it do


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lane_does_not_depend_on_its_neighbours(shape: Shape, dtype: torch.dtype) -> None:
    """Prefill of one lane, decode of two and a short piece of another in one pass, in two orders, after rows of padding."""
    shape = replace(shape, dtype=dtype)
    lengths, last = [300, 257, 520, 40], [120, 1, 1, 12]
    lanes = [random_tokens(shape, length, seed=lane) for lane, length in enumerate(lengths)]
    expected = [alone(shape, tokens)[-count:] for tokens, count in zip(lanes, last, strict=True)]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        pages, tables = shape.arena(140), [range(lane, 140, 4) for lane in range(4)]
        for lane in order:
            start = Piece(tokens=lanes[lane][: -last[lane]], position=0, table=tables[lane])
            run(shape, pages, [start])
        pieces = [
            Piece(tokens=lanes[lane][-last[lane] :], position=lengths[lane] - last[lane], table=tables[lane])
            for lane in order
        ]
        for lane, out in zip(order, run(shape, pages, pieces, padding=3), strict=True):
            assert torch.equal(out, expected[lane])


@pytest.mark.parametrize("window", [1, 15, 16, 17, 255, 256, 257])
@pytest.mark.parametrize("pieces", [1, 40])
def test_windows_end_where_they_should_at_edges_of_blocks_and_tiles(window: int, pieces: int) -> None:
    shape = Shape(variant=Variant(scaling=0.2, window=window))
    tokens = random_tokens(shape, 530)
    rows = [0, 14, 15, 16, 17, 254, 255, 256, 257, 510, 511, 512, 513, 529]
    exact = attend_exactly(tokens.query[rows], tokens.key, tokens.value, rows, shape.variant)
    assert torch.allclose(alone(shape, tokens, pieces=pieces)[rows].double(), exact, atol=1e-5)


def test_a_tree_of_forks_that_share_pages_equals_separate_copies(shape: Shape) -> None:
    """Twelve lanes: all share 512 tokens, halves share 100 more, each has its own end."""
    trunk, branches = random_tokens(shape, 512), [random_tokens(shape, 100, seed=1 + half) for half in range(2)]
    leaves = [random_tokens(shape, 3 + lane, seed=10 + lane) for lane in range(12)]
    lanes = [_joined(trunk, branches[lane % 2], leaf) for lane, leaf in enumerate(leaves)]
    pages, free = shape.arena(400), iter(range(400))
    trunk_pages = [next(free) for _ in range(shape.num_pages(512))]
    run(shape, pages, [Piece(tokens=trunk, position=0, table=trunk_pages)])
    pieces = []
    for lane, tokens in enumerate(lanes):
        table = [*trunk_pages, *(next(free) for _ in range(shape.num_pages(len(tokens) - 512)))]
        run(shape, pages, [Piece(tokens=branches[lane % 2], position=512, table=table)])
        pieces.append(Piece(tokens=leaves[lane], position=612, table=table))
    for out, tokens in zip(run(shape, pages, pieces), lanes, strict=True):
        assert torch.equal(out, alone(shape, tokens)[612:])


def _joined(*parts: Tokens) -> Tokens:
    query, key, value = (torch.cat([getattr(part, name) for part in parts]) for name in ("query", "key", "value"))
    return Tokens(query=query, key=key, value=value)


@native_only
def test_more_partial_results_than_are_kept_at_a_time_are_merged_in_rounds() -> None:
    """64 lanes of 31 rows after 2,500 shared tokens: ten blocks, eight of which fit a round."""
    shape = Shape(query_heads=16, heads=1, key_dim=16, value_dim=16, page_tokens=256)
    trunk, leaf = random_tokens(shape, 2500), random_tokens(shape, 31, seed=1)
    pages = shape.arena(80)
    run(shape, pages, [Piece(tokens=trunk, position=0, table=range(10))])
    pages[10:74] = pages[9]
    pieces = [Piece(tokens=leaf, position=2500, table=[*range(9), 10 + lane]) for lane in range(64)]
    expected = alone(shape, _joined(trunk, leaf))[2500:]
    assert all(torch.equal(out, expected) for out in run(shape, pages, pieces))


def test_the_torch_version_is_as_close_to_float64(shape: Shape) -> None:
    tokens = random_tokens(shape, 300)
    out = _with_torch(shape, tokens, 300)
    rows = [0, 16, 255, 256, 299]
    exact = attend_exactly(tokens.query[rows], tokens.key, tokens.value, rows, shape.variant)
    assert torch.allclose(out[rows].double(), exact, atol=1e-5)


@pytest.mark.parametrize("last", [1, 9])
def test_the_torch_version_does_not_depend_on_how_many_rows_a_pass_has(shape: Shape, last: int) -> None:
    tokens = random_tokens(shape, 273)
    assert torch.equal(_with_torch(shape, tokens, 273 - last), _with_torch(shape, tokens, 273))


def _with_torch(shape: Shape, tokens: Tokens, size: int) -> torch.Tensor:
    pages, variant = shape.arena(shape.num_pages(len(tokens))), shape.variant
    table = torch.arange(len(pages), dtype=torch.int32)[None]
    asked = (1, variant.scaling, variant.window, variant.softcap, variant.sinks)
    outs = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        segments = torch.tensor([[0, len(part), start]])
        call = Call(part.query, part.key, part.value, pages, segments, table, *asked)
        outs.append(append_and_attend_with_torch(call))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("segment", "table"),
    [
        ([0, 5, 0], [0, 1]),  # more rows than there are
        ([0, 4, 30], [0, 1]),  # past the end of the table
        ([0, 4, 0], [-1, 1]),  # no page
        ([0, 4, 0], [7, 1]),  # a page that is not there
        ([0, 4, -1], [0, 1]),  # before the first position
        ([-1, 4, 0], [0, 1]),
        ([0, 1, 2**63 - 1], [0, 1]),  # sums that overflow
        ([2**63 - 1, 1, 0], [0, 1]),
        ([3, 2**63 - 2, 0], [0, 1]),
    ],
)
def test_routes_that_lead_nowhere_are_refused_and_nothing_is_written(segment: list[int], table: list[int]) -> None:
    shape = Shape()
    pages, tokens = shape.arena(2, garbage=3.0), random_tokens(shape, 4)
    with pytest.raises(InvalidInput) as refusal:
        append_and_attend(
            tokens.query, tokens.key, tokens.value, pages, torch.tensor([segment]),
            torch.tensor([table], dtype=torch.int32), 1, 0.2, 0, 0.0, None,
        )  # fmt: skip
    assert refusal.value.code == "invalid_input.routes"
    assert (pages == 3.0).all()


def test_shapes_and_dtypes_that_do_not_fit_together_are_refused() -> None:
    shape = Shape()
    tokens, segments = random_tokens(shape, 4), torch.tensor([[0, 4, 0]])
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    for key, pages in (
        (tokens.key.half(), shape.arena(2)),
        (tokens.key[:, :, :8], shape.arena(2)),
        (tokens.key, shape.arena(2)[..., :-1]),
    ):
        with pytest.raises(InvalidInput, match="fit together"):
            append_and_attend(tokens.query, key, tokens.value, pages, segments, table, 0, 0.2, 0, 0.0, None)


@pytest.mark.parametrize("kernel", [append_and_attend, lambda *given: append_and_attend_with_torch(Call(*given))])
def test_what_an_address_would_be_taken_of_has_the_shape_that_is_read(kernel: Callable[..., torch.Tensor]) -> None:
    shape = Shape()
    tokens, pages = random_tokens(shape, 4), shape.arena(2)
    segments, tables = torch.tensor([[0, 4, 0]]), torch.tensor([[0, 1]], dtype=torch.int32)
    given = [tokens.query, tokens.key, tokens.value, pages, segments, tables, 0, 0.2, 0, 0.0, None]
    kernel(*given)
    for place, wrong in (
        (0, tokens.query[:, 0]),
        (0, tokens.query[:, :0]),
        (1, tokens.key[:, :0]),
        (3, pages[0]),
        (4, segments.float()),
        (4, segments[:, :2].contiguous()),
        (4, torch.tensor([[0, 1, 0], [1, 1, 0]])),  # more lanes than tables
        (5, tables[0]),
        (5, tables.long()),
        (6, -1),
        (6, pages.shape[1]),
        (8, -1),
        (9, -1.0),
        (9, float("nan")),
        (10, torch.zeros(1)),
        (10, torch.zeros(shape.query_heads, 1)),
    ):
        with pytest.raises(InvalidInput):
            kernel(*given[:place], wrong, *given[place + 1 :])


def test_the_op_has_a_shape_without_values() -> None:
    shape = replace(SHAPES["grouped by eight, values wider"], dtype=torch.bfloat16)
    with torch.device("meta"):
        query, key, value = torch.empty(5, 8, 80), torch.empty(5, 1, 80), torch.empty(5, 1, 96)
        out = append_and_attend(
            query, key, value, shape.arena(2), torch.empty(1, 3), torch.empty(1, 2), 0, 1.0, 0, 0.0, None
        )
    assert (out.shape, out.device.type) == ((5, 8, 96), "meta")
