"""The op ``forkpoint::append_and_attend``: a pass writes its keys and values to pages and attends over page tables, all lanes in one call.

On the CPU the native kernel runs; elsewhere, and where no compiler was available at install, torch does the same block by block, slower.
Both keep one order of every sum, fixed by absolute position (docs/design/0011), so a row's bits do not depend on which rows, lanes, pages
or threads there are beside it. The two differ from one another in the last bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.call import Call
from forkpoint.llm.kernels.native import find_native
from forkpoint.llm.kernels.portable_attention import append_and_attend_with_torch

_LIBRARY: Final = torch.library.Library("forkpoint", "FRAGMENT")
_LIBRARY.define(
    "append_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) pages, Tensor segments, Tensor tables, int layer, "
    "float scaling, int window, float softcap, Tensor? sinks) -> Tensor"
)


def append_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    segments: Tensor,
    tables: Tensor,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Append a pass's keys and values of one layer, then attend each row to positions up to its own.

    Args:
        query: ``[rows query_heads key_dim]``.
        key, value: ``[rows heads dim]``; query heads are grouped over them in order.
        pages: the group's arena ``[pages layers elements]``, written.
        segments: int64 ``[lanes 3]``: first row, rows, first position. Rows of none are padding.
        tables: int32 ``[lanes n]``: page numbers in order of position, -1 where a lane has no more.
        layer: of the group.
        scaling: factor of the dot products.
        window: positions a row looks back, itself included; 0 to the start.
        softcap: bound of the logits; 0 for none.
        sinks: a further logit in the denominator, ``[query_heads]``, or None.

    Returns:
        ``[rows query_heads value_dim]`` in the query's dtype; zeros for padding.

    Raises:
        InvalidInput: ``invalid_input.routes`` where segments or tables lead outside rows or pages; ``invalid_input.attention`` where
            shapes or dtypes do not fit together. Nothing was written.
    """
    out: Tensor = torch.ops.forkpoint.append_and_attend.default(
        query, key, value, pages, segments, tables, layer, scaling, window, softcap, sinks
    )
    return out


def _on_cpu(*given: Any) -> Tensor:
    native = find_native()
    return _with_torch(*given) if native is None else _natively(native, Call(*given))


def _natively(native: ModuleType, call: Call) -> Tensor:
    geometry, pages = call.geometry(), call.pages
    call.check()
    query, key, value = _row_by_row(call.query), _row_by_row(call.key), _row_by_row(call.value)
    out = query.new_empty(len(query), query.shape[1], geometry.value_dim)
    segments, tables = call.segments.contiguous(), call.tables.contiguous()
    sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
    if not pages.is_contiguous():
        raise InvalidInput(f"pages {tuple(pages.shape)} do not lie side by side in memory", code="attention")
    sizes = (len(query), query.shape[1])
    try:
        native.append_and_attend(
            _rows(query), _rows(key), _rows(value), _rows(out), *sizes, pages.data_ptr(), len(pages), geometry.native_shape,
            segments.data_ptr(), len(segments), tables.data_ptr(), tables.shape[1], call.layer, call.scaling, call.window,
            call.softcap, 0 if sinks is None else sinks.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
    except ValueError as error:
        raise InvalidInput(str(error), code="routes") from error
    return out


def _row_by_row(rows: Tensor) -> Tensor:
    """The same with heads side by side; rows may lie apart."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def _rows(rows: Tensor) -> tuple[int, int]:
    return rows.data_ptr(), rows.stride(0)


def _with_torch(*given: Any) -> Tensor:
    return append_and_attend_with_torch(Call(*given))


def _meta(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_LIBRARY.impl("append_and_attend", _on_cpu, "CPU")
_LIBRARY.impl("append_and_attend", _with_torch, "CompositeExplicitAutograd")
_LIBRARY.impl("append_and_attend", _meta, "Meta")
