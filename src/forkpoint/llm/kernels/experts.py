"""Experts of a mixture, registered with transformers as ``forkpoint``: a row's bits do not depend on how many rows an expert is given.

Each expert's rows run in blocks of one fixed number of rows, and a row's experts are added in the order in which its router names them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

from forkpoint.llm.kernels.dense import in_blocks

EXPERTS: Final = "forkpoint"


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``hidden_states [rows dim]`` through the experts ``top_k_index [rows k]`` with ``top_k_weights [rows k]``: ``[rows dim]``.

    Rows that name an expert beyond the last get nothing from it.
    """
    num_rows, num_chosen = top_k_index.shape
    parts = hidden_states.new_zeros(num_rows, num_chosen, hidden_states.shape[-1])
    for expert in sorted(set(top_k_index.flatten().tolist())):
        if expert >= module.num_experts:
            continue
        rows, places = torch.where(top_k_index == expert)
        parts[rows, places] = in_blocks(lambda block, e=expert: _run(module, block, e), hidden_states[rows])  # type: ignore[misc]
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for place in range(num_chosen):
        weighted = parts[:, place] * top_k_weights[:, place, None].to(parts.dtype)
        total += weighted
    return total.to(hidden_states.dtype)


def _run(module: Any, rows: Tensor, expert: int) -> Tensor:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, rows, name, expert)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _linear(module, inner, "down_proj", expert)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _linear(module: Any, rows: Tensor, name: str, expert: int) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(rows, weight.t() if module.is_transposed else weight, bias)


ExpertsInterface.register(EXPERTS, experts_forward)
