"""From recorded operations to instructions: what each operation means, or which one has no instruction.

Pure: a graph gives a listing or ``Unlowerable``. Views cost nothing. What depends on positions alone becomes a table with a row for each
position, computed once by running the model's own operations over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from forkpoint.llm.resident import lower_arithmetic, lower_layers, lower_views
from forkpoint.llm.resident.instructions import Instruction, Kind, Listing, Opcode, Source
from forkpoint.llm.resident.layouts import row_major
from forkpoint.llm.resident.tracing import Graph, Node, Unlowerable
from forkpoint.llm.resident.workbench import Handler, Workbench, operation

_HANDLERS: Final[dict[str, Handler]] = {
    **lower_views.HANDLERS,
    **lower_arithmetic.HANDLERS,
    **lower_layers.HANDLERS,
}
_NAMESPACES: Final = ("aten", "forkpoint")


def lower(graph: Graph, pages: Sequence[Tensor], *, max_context: int) -> Listing:
    """Instructions for a graph, in its order, what nothing needs left out.

    Args:
        graph: the trace.
        pages: the page tensors that were passed while tracing, by which state groups are told apart.
        max_context: positions that tables cover.

    Raises:
        Unlowerable: naming the operation that has no instruction.
    """
    bench = Workbench(graph, pages, max_context=max_context)
    for node in graph.nodes:
        bench.note(node)
        if not all(bench.is_table(value) for value in node.outputs):
            _lower_node(bench, node)
    return _needed(bench)


def _lower_node(bench: Workbench, node: Node) -> None:
    name = operation(node)
    if bench.is_tokens(node.args[0]) and name in lower_views.OF_TOKENS:
        bench.bind_tokens(node)
        return
    handler = _HANDLERS.get(name) if node.name.split(".")[0] in _NAMESPACES else None
    if handler is None:
        raise Unlowerable("operation", f"there is no kernel for {node.name}", operation=node.name)
    try:
        handler(bench, node)
    except Unlowerable as error:
        refusal = error.refusal
        raise Unlowerable(refusal.code, refusal.why, operation=refusal.operation or node.name) from error


def _needed(bench: Workbench) -> Listing:
    """Write the logits, and leave out what nothing needs."""
    view, listing = bench.view(bench.graph.output), bench.listing
    logits = Source(kind=Kind.LOGITS, width=view.width, dtype=torch.float32)
    target = row_major(listing.add_source(logits), view.shape)
    listing.instructions.append(Instruction(opcode=Opcode.COPY, inputs=(view,), output=target))
    needed = {target.source}
    kept: list[Instruction] = []
    for instruction in reversed(listing.instructions):
        output = instruction.output
        if output is None or output.source in needed:
            needed |= instruction.reads
            kept.append(instruction)
    return Listing(sources=listing.sources, instructions=kept[::-1])
