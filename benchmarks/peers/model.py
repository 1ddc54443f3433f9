"""What a model costs at least, from its folder: bytes that a step must read, operations that a prompt must take."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Counts of a decoder with tied or untied embeddings and dense layers.

    ``weight_bytes`` are all parameters once; ``layer_parameters`` those of the matrices of all layers; ``head_parameters`` those of the
    output layer; ``token_bytes`` the keys and values of one token; ``query_width`` the summed width of all query heads of all layers;
    ``dense_shapes`` (outputs, inputs) of every matrix that a step multiplies by, the output layer last.
    """

    weight_bytes: int
    layer_parameters: int
    head_parameters: int
    token_bytes: int
    query_width: int
    dense_shapes: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, folder: str, token_bytes: int) -> Self:
        """Of the model in this folder: ``config.json`` and the head of ``model.safetensors``."""
        config = json.loads((Path(folder) / "config.json").read_text())
        with (Path(folder) / "model.safetensors").open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            tensors = {name: entry for name, entry in json.loads(file.read(size)).items() if name != "__metadata__"}
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        layers = [entry["shape"] for name, entry in tensors.items() if ".layers." in name and len(entry["shape"]) == 2]
        head = (config["vocab_size"], config["hidden_size"])
        return cls(
            weight_bytes=sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values()),
            layer_parameters=sum(map(math.prod, layers)),
            head_parameters=math.prod(head),
            token_bytes=token_bytes,
            query_width=config["num_hidden_layers"] * config["num_attention_heads"] * width,
            dense_shapes=(*((outputs, inputs) for outputs, inputs in layers), head),
        )

    def step_bytes(self, tokens: int) -> int:
        """Bytes that a decode step over ``tokens`` distinct tokens reads: every weight and every key and value once."""
        return self.weight_bytes + tokens * self.token_bytes

    def attention_operations(self, rows: int, context: int) -> int:
        """Operations of the attention of ``rows`` rows to ``context`` tokens each."""
        return 2 * 2 * self.query_width * rows * context

    def prefill_operations(self, context: int) -> int:
        """Operations, two for each product and sum, of a prompt: layers for every token, causal attention, one row of the output layer."""
        attention = 2 * 2 * self.query_width * (context * (context + 1) // 2)
        return 2 * self.layer_parameters * context + attention + 2 * self.head_parameters
