"""A model as one native call: built once for (model, page size), run for every pass.

``build_program`` traces the model, lowers the trace and binds it to weights and pages. ``Program.run`` then takes what changes from pass
to pass: token ids, positions, segments, page tables, and which rows' logits are wanted. Knows nothing of lanes, states or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.native import find_native
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.llm.resident.encoding import encode
from forkpoint.llm.resident.instructions import DTYPES, Kind, Listing
from forkpoint.llm.resident.lowering import lower
from forkpoint.llm.resident.placement import TAIL_ROWS, Placed, place
from forkpoint.llm.resident.routed import STEP_KEYWORD, RoutedStep
from forkpoint.llm.resident.tracing import Graph, Refusal, Unlowerable, trace


@final
class Program:
    """A lowered model, bound to weights and pages. One run at a time; the caller sees to that.

    Attributes:
        vocabulary: logits of a row.
        max_rows: rows of the largest pass.
    """

    def __init__(
        self, placed: Placed, groups: Sequence[GroupSpec], *, page_tokens: int, max_rows: int, max_context: int
    ) -> None:
        code, native = encode(placed), find_native()
        assert native is not None
        self.vocabulary = _vocabulary(placed)
        self.max_rows = max_rows
        self._groups = tuple(groups)
        self._page_tokens = page_tokens
        self._placed = placed  # holds weights and tables, whose addresses native code has
        self._pages: tuple[Tensor, ...] = ()
        self._native = native.build_program(
            code.integers,
            code.numbers,
            placed.body,
            placed.middle,
            TAIL_ROWS,
            placed.num_bytes,
            self.vocabulary,
            max_rows,
            max_context,
            len(self._groups),
        )

    def run(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        segments: NDArray[np.int64],
        tables: Sequence[NDArray[np.int32]],
        output_rows: NDArray[np.int64],
        *,
        threads: int,
    ) -> NDArray[np.float32]:
        """Run all layers over ``rows`` rows, appending keys and values to the bound pages. The GIL is released.

        A row's bits depend on its tokens and positions alone, not on what runs beside it or on ``threads``.

        Args:
            token_ids, positions: ``[rows]``, at most ``max_rows``. Rows of no segment are computed and lead nowhere.
            segments: ``[segments 3]`` as docs/design/0011 says.
            tables: one ``[segments pages]`` a state group.
            output_rows: rows whose logits are wanted, ``[n]``; none for a pass that only appends, which is cheaper.
            threads: OpenMP threads.

        Returns:
            ``float32 [n vocabulary]``.

        Raises:
            InvalidInput: ``invalid_input.pass`` for arrays that do not fit one another, tokens, positions, rows or pages out of range.
                Nothing has changed.
        """
        logits = np.empty((len(output_rows), self.vocabulary), np.float32)
        try:
            self._native.run(token_ids, positions, segments, tables, output_rows, logits, threads)
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"this pass cannot run: {error}", code="pass") from error
        return logits

    def rebind(self, pages: Sequence[Tensor]) -> Refusal | None:
        """Use other page tensors from now on, or say why not (``pages``, ``dtype``, ``device``); a refusal changes nothing."""
        page_tokens = self._page_tokens
        if len(pages) != len(self._groups):
            return _refuse("pages", f"{len(pages)} page tensors for {len(self._groups)} state groups")
        for group, tensor in zip(self._groups, pages, strict=True):
            if (refusal := _misfit(group, tensor, page_tokens)) is not None:
                return refusal
        for index, (group, tensor) in enumerate(zip(self._groups, pages, strict=True)):
            shape = (page_tokens, len(group.layers), group.num_heads, group.key_dim, group.value_dim)
            self._native.bind(index, tensor.data_ptr(), tensor.shape[0], *shape, DTYPES[group.dtype])
        self._pages = tuple(pages)
        return None


def build_program(
    model: Any,
    groups: Sequence[GroupSpec],
    pages: Sequence[Tensor],
    *,
    page_tokens: int,
    max_context: int,
    max_rows: int,
) -> Program | Refusal:
    """Trace, lower and bind a model whose modules were replaced.

    Args:
        model: a causal language model of transformers that attends through ``engines/attention.py``.
        groups: its state groups.
        pages: one tensor a group, ``[pages layers elements]``.
        page_tokens: tokens of a page.
        max_context: positions that tables cover; no pass goes beyond.
        max_rows: rows of the largest pass.

    Returns:
        The program, or why this model has to run eagerly.
    """
    if find_native() is None:
        return _refuse("kernels", "the native kernels were not built, or are switched off")
    if model.device.type != "cpu":
        return _refuse("device", f"the model is on {model.device}")
    try:
        placed = place(lower_model(model, groups, max_context=max_context), max_rows=max_rows)
        program = Program(placed, groups, page_tokens=page_tokens, max_rows=max_rows, max_context=max_context)
    except Unlowerable as error:
        return error.refusal
    return program.rebind(pages) or program


def lower_model(model: Any, groups: Sequence[GroupSpec], *, max_context: int) -> Listing:
    """The instructions of a model. Raises Unlowerable."""
    probes = [_probe_pages(group) for group in groups]
    graph = _traced(model, groups, probes, max_context)
    return lower(graph, probes, max_context=max_context)


def _traced(model: Any, groups: Sequence[GroupSpec], pages: Sequence[Tensor], max_context: int) -> Graph:
    """Padding rows lead nowhere, so the trace runs without segments and needs no more than one page."""
    step = RoutedStep(
        groups=groups,
        pages=pages,
        segments=torch.zeros(0, 3, dtype=torch.int64),
        tables=[torch.zeros(0, 1, dtype=torch.int32) for _ in groups],
    )

    def run(tokens: Tensor, positions: Tensor) -> Tensor:
        step_keyword = {STEP_KEYWORD: step}
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **step_keyword).logits
        assert isinstance(logits, Tensor)
        return logits

    vocabulary = int(model.config.get_text_config().vocab_size)
    return trace(run, vocabulary=vocabulary, max_position=max_context)


def _probe_pages(group: GroupSpec) -> Tensor:
    elements = 16 * group.num_heads * (group.key_dim + group.value_dim)
    return torch.zeros(1, len(group.layers), elements, dtype=group.dtype)


def _misfit(group: GroupSpec, pages: Tensor, page_tokens: int) -> Refusal | None:
    want = (len(group.layers), page_tokens * group.num_heads * (group.key_dim + group.value_dim))
    if pages.device.type != "cpu":
        return _refuse("device", f"the pages of {group.name} are on {pages.device}")
    if pages.dtype != group.dtype:
        return _refuse("dtype", f"the pages of {group.name} hold {pages.dtype}, not {group.dtype}")
    if pages.dim() != 3 or tuple(pages.shape[1:]) != want or not pages.is_contiguous():
        return _refuse("pages", f"the pages of {group.name} have the shape {tuple(pages.shape)}, not [pages, {want}]")
    return None


def _vocabulary(placed: Placed) -> int:
    return next(source.width for source in placed.sources if source.kind == Kind.LOGITS)


def _refuse(code: str, why: str) -> Refusal:
    return Refusal(code=code, operation="", why=why)
