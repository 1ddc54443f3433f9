"""Lowering: the instructions of a graph, what is fused, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.llm.resident.instructions import Kind, Listing, Opcode
from forkpoint.llm.resident.lowering import lower
from forkpoint.llm.resident.placement import TAIL_ROWS, Placed, place
from forkpoint.llm.resident.tracing import Refusal, Run, Unlowerable, trace

_VOCABULARY, _WIDTH, _CONTEXT = 32, 16, 64
_TABLE = torch.randn(_VOCABULARY, _WIDTH, generator=torch.Generator().manual_seed(1))
_ANGLES = torch.randn(_CONTEXT, _WIDTH, generator=torch.Generator().manual_seed(2))


def _embedded(tokens: Tensor) -> Tensor:
    return torch.nn.functional.embedding(tokens, _TABLE)


def _lowered(run: Run) -> Listing:
    return lower(trace(run, vocabulary=_VOCABULARY, max_position=_CONTEXT), [], max_context=_CONTEXT)


def _refused(run: Run) -> Refusal:
    with pytest.raises(Unlowerable) as refused:
        _lowered(run)
    return refused.value.refusal


def _opcodes(run: Run) -> list[Opcode]:
    return [instruction.opcode for instruction in _lowered(run).instructions]


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _turned(tokens: Tensor, positions: Tensor, turn: Callable[[Tensor], Tensor] = _rotate_half) -> Tensor:
    x, cos, sin = _embedded(tokens), _ANGLES[positions].cos(), _ANGLES[positions].sin()
    return x * cos + turn(x) * sin


def test_a_rotary_embedding_is_one_instruction() -> None:
    assert _opcodes(_turned) == [Opcode.LOOKUP, Opcode.ROTARY, Opcode.COPY]


def test_what_only_resembles_a_rotary_embedding_is_computed_as_written() -> None:
    def halves_swapped(x: Tensor) -> Tensor:
        return torch.cat((x[..., _WIDTH // 2 :], -x[..., : _WIDTH // 2]), dim=-1)

    def thirds(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)

    for turn in (halves_swapped, thirds):
        found = _opcodes(lambda tokens, positions, turn=turn: _turned(tokens, positions, turn))  # type: ignore[misc]
        assert Opcode.ROTARY not in found
        assert found.count(Opcode.ADD) == 1


def test_turning_a_part_of_each_head_is_one_instruction() -> None:
    def run(tokens: Tensor, positions: Tensor) -> Tensor:
        heads = _embedded(tokens).view(1, -1, 2, 8).transpose(1, 2)
        cos, sin = (part[:, None] for part in (_ANGLES[positions][..., :4].cos(), _ANGLES[positions][..., :4].sin()))
        first, rest = heads[..., :4], heads[..., 4:]
        turned = torch.cat((first * cos + _rotate_half(first) * sin, rest), dim=-1)
        return turned.transpose(1, 2).reshape(1, -1, _WIDTH)

    found = _lowered(run)
    assert [item.opcode for item in found.instructions] == [Opcode.LOOKUP, Opcode.ROTARY, Opcode.COPY]
    assert found.instructions[1].numbers == (4,)


def test_what_depends_on_positions_alone_is_a_table_of_all_positions() -> None:
    listing = _lowered(lambda tokens, positions: _embedded(tokens) + _ANGLES[positions].cos())
    tables = [source.tensor for source in listing.sources if source.kind == Kind.TABLE]
    assert len(tables) == 1
    assert tables[0] is not None
    assert torch.equal(tables[0], _ANGLES.cos())


def test_a_table_that_many_layers_read_exists_once() -> None:
    def run(tokens: Tensor, positions: Tensor) -> Tensor:
        x, cos = _embedded(tokens).view(1, -1, 2, 8), _ANGLES[positions][..., :8].cos()
        for _ in range(3):
            x = x + cos.unsqueeze(2)
        return x.reshape(1, -1, _WIDTH)

    tables = [source.tensor for source in _lowered(run).sources if source.kind == Kind.TABLE]
    assert len({table.data_ptr() for table in tables if table is not None}) == 1


def test_what_nothing_needs_is_left_out() -> None:
    def run(tokens: Tensor, _positions: Tensor) -> Tensor:
        x = _embedded(tokens)
        _unused = x * 2 + 1
        return x

    assert _opcodes(run) == [Opcode.LOOKUP, Opcode.COPY]


def _sorted(tokens: Tensor, _positions: Tensor) -> Tensor:
    return _embedded(tokens).sort(dim=-1).values


def _over_rows(tokens: Tensor, _positions: Tensor) -> Tensor:
    return _embedded(tokens).transpose(1, 2).reshape(1, 4, -1)


def _looking(tokens: Tensor, _positions: Tensor) -> Tensor:
    x = _embedded(tokens)
    return x * 2 if x.sum() > 0 else x


def _by_count(tokens: Tensor, _positions: Tensor) -> Tensor:
    x = _embedded(tokens)
    for _ in range(tokens.shape[1]):
        x = x + 1
    return x


def _first_row(tokens: Tensor, _positions: Tensor) -> Tensor:
    return _embedded(tokens)[:, :1]


def _tokens_as_numbers(tokens: Tensor, _positions: Tensor) -> Tensor:
    return _embedded(tokens) * tokens[..., None]


def _in_double(tokens: Tensor, _positions: Tensor) -> Tensor:
    return _embedded(tokens).double()


@pytest.mark.parametrize(
    ("run", "code", "operation"),
    [
        (_sorted, "operation", "aten.sort.default"),
        (_over_rows, "layout", "aten._unsafe_view.default"),
        (_looking, "values", "aten._local_scalar_dense.default"),
        (_by_count, "rows", ""),
        (_first_row, "layout", "aten.slice.Tensor"),
        (_tokens_as_numbers, "values", None),
        (_in_double, "dtype", "aten._to_copy.default"),
    ],
)
def test_what_cannot_be_lowered_is_refused_by_name(run: Run, code: str, operation: str | None) -> None:
    refusal = _refused(run)
    assert refusal.code == code
    assert refusal.why
    if operation is not None:
        assert refusal.operation == operation


def _chain(length: int) -> Placed:
    def run(tokens: Tensor, _positions: Tensor) -> Tensor:
        x = _embedded(tokens)
        for _ in range(length):
            x = x + x * 3.0
        return x

    return place(_lowered(run), max_rows=128)


def test_buffers_that_live_at_one_time_do_not_overlap() -> None:
    placed = _chain(20)
    lives: dict[int, tuple[int, int]] = {}
    for index, item in enumerate(placed.instructions):
        for source in item.reads | ({item.output.source} if item.output else set()):
            if placed.sources[source].kind == Kind.BUFFER:
                lives[source] = (lives.get(source, (index, 0))[0], index)
    spans = {source: (placed.addresses[source], placed.addresses[source] + TAIL_ROWS * _WIDTH * 4) for source in lives}
    for left, (born, died) in lives.items():
        for right, (other_born, other_died) in lives.items():
            if left < right and born <= other_died and other_born <= died:
                assert spans[left][1] <= spans[right][0] or spans[right][1] <= spans[left][0]


def test_buffers_are_used_again() -> None:
    assert _chain(40).num_bytes == _chain(20).num_bytes


def test_threads_wait_where_an_instruction_reads_what_another_wrote() -> None:
    placed = _chain(5)
    written: set[int] = set()
    for item, waits in zip(placed.instructions, placed.waits, strict=True):
        if waits:
            written = set()
        assert not item.reads & written
        if item.output is not None:
            written.add(item.output.source)


def test_the_tail_runs_over_buffers_of_its_own() -> None:
    placed = _chain(3)
    assert placed.body == placed.middle == 0  # nothing is appended, so everything is tail
    assert all(item.opcode != Opcode.GATHER for item in placed.instructions)


def test_a_constant_that_changes_from_trace_to_trace_is_refused() -> None:
    calls: list[int] = []

    def run(tokens: Tensor, _positions: Tensor) -> Any:
        calls.append(1)
        return _embedded(tokens) * torch.full((_WIDTH,), float(len(calls)))

    assert _refused(run).code == "rows"
