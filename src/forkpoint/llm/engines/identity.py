"""The fingerprint of a loaded transformers model: state identity and execution identity as canonical records."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import transformers

from forkpoint.errors import Incompatible
from forkpoint.ids import ObjectId
from forkpoint.llm.engines.codec import TransformersCodec
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.state.canonical import Record, Value, from_float

LAYOUT_VERSION: Final = 1
"""Of keys and values in a chunk: ``k`` and ``v``, each ``[layer token head dim]``."""

KERNEL: Final = "forkpoint.1"
"""Changes when a kernel gives other bits."""

_VECTOR_UNITS: Final = ("amx", "avx", "f16c", "fma", "neon", "sve")

_NOT_STATE: Final = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_internal", "transformers_version", "dtype", "torch_dtype",
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type",
    "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "initializer_range", "pretraining_tp", "chunk_size_feed_forward", "is_encoder_decoder", "add_cross_attention", "is_decoder",
    "cross_attention_hidden_size", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout",
    "task_specific_params", "tokenizer_class", "prefix", "finetuning_task", "quantization_config",
}  # fmt: skip
"""Configuration that does not change what a token's state is. Everything else does, for all that is known: a key that a later release adds
is a difference, and is named. Weights are digested as loaded, so how they were quantised says nothing more."""


def state_record(model: Any, codec: TransformersCodec, groups: Sequence[GroupSpec], parameters: ObjectId) -> Record:
    """What must match for stored state to fit."""
    config = {key: _canonical(item) for key, item in model.config.to_dict().items() if key not in _NOT_STATE}
    return {
        "adapters": [],
        "architecture": type(model).__name__,
        "chat_template": codec.template_id,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "config": config,
        "groups": [group.to_record() for group in groups],
        "layout": LAYOUT_VERSION,
        "parameters": parameters,
        "tokenizer": codec.tokenizer_id,
    }


def machine_record(device: torch.device) -> Record:
    """The part of an execution identity that the machine and the installed libraries decide."""
    return {
        "compile": "none",
        "device": device.type,
        "engine": "forkpoint.transformers",
        "instruction_set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}: {_vector_units()}",
        "kernel": KERNEL,
        "libraries": {
            "numpy": np.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    }


def _vector_units() -> str:
    """The processor's vector and matrix instructions, by which libraries choose their code paths."""
    found = torch.cpu.get_capabilities()
    return " ".join(sorted(name for name, has in found.items() if has is True and name.startswith(_VECTOR_UNITS)))


def _canonical(value: object) -> Value:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return from_float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_canonical(item) for item in items]
    if isinstance(value, torch.dtype):
        return str(value)
    raise Incompatible(
        f"the configuration holds a {type(value).__name__}, which has no canonical form; this model cannot be identified",
        code="architecture", field="config", have=type(value).__name__, want="plain values",
    )  # fmt: skip
