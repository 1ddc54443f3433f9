"""Tiny random models of many architectures, with a tokenizer and a chat template, as folders that the engine loads like any other."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as token_models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from forkpoint.llm import TransformersEngine
from forkpoint.llm.engines.base import Logits
from forkpoint.llm.engines.runtime import MIN_EAGER_ROWS, TransformersRuntime
from forkpoint.repo.repository import Repository

VOCABULARY: Final = 320
CONTEXT: Final = 2048
TEMPLATE: Final = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
_TEXT: Final = ["the keeper opened the door and the light went out", "naïve café \U0001f600 日本語 한국어"] * 2


def decoder_config(kind: str, **changes: object) -> Any:
    """A small configuration in the fields that most decoders share."""
    fields: dict[str, object] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "eos_token_id": 1, "bos_token_id": 0,
        "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **(fields | changes))


def gpt2_config(**changes: object) -> Any:
    """GPT-2 with a table of 64 learned positions."""
    fields: dict[str, object] = {
        "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": 64, "eos_token_id": 1,
        "bos_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    return AutoConfig.for_model("gpt2", **(fields | changes))


def gemma4_config(**changes: object) -> Any:
    """Layers of two shapes, so two state groups."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return decoder_config(
        "gemma4_text", num_hidden_layers=4, layer_types=kinds, sliding_window=32, global_head_dim=32,
        hidden_size_per_layer_input=0, **changes,
    )  # fmt: skip


ARCHITECTURES: Final[dict[str, Callable[[], Any]]] = {
    "llama": lambda: decoder_config("llama"),
    "gpt2": gpt2_config,
    "qwen2": lambda: decoder_config("qwen2"),
    "qwen3": lambda: decoder_config("qwen3"),
    "mistral": lambda: decoder_config("mistral", sliding_window=32),
    "gemma2": lambda: decoder_config("gemma2", sliding_window=32, attn_logit_softcapping=2.0),
    "gemma3": lambda: decoder_config(
        "gemma3_text",
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_logit_softcapping=None,
    ),
    "gemma4": lambda: gemma4_config(num_kv_shared_layers=0),
    "gpt_oss": lambda: decoder_config("gpt_oss", sliding_window=32, num_local_experts=4, num_experts_per_tok=2),
    "mixtral": lambda: decoder_config("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "opt": lambda: AutoConfig.for_model(
        "opt",
        vocab_size=VOCABULARY,
        hidden_size=48,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=48,
        eos_token_id=1,
        init_std=0.3,
    ),
    "deepseek_v3": lambda: decoder_config(
        "deepseek_v3",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        head_dim=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
    ),
}


def make_tokenizer(*, vocabulary: int = VOCABULARY, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0 and 1 are ``<s>`` and ``</s>``, any text encodes, single tokens may be parts of characters."""
    tokenizer = Tokenizer(token_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<s>", chat_template=template
    )


def make_model(config: Any, *, seed: int = 0) -> Any:
    """A random model in float32: the same seed gives the same weights, whatever else the configuration says."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def save_model(folder: Path, config: Any, *, seed: int = 0, template: str = TEMPLATE) -> Path:
    """Write a random model and its tokenizer to ``folder``."""
    make_model(config, seed=seed).save_pretrained(folder)
    make_tokenizer(template=template).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Change fields of a saved model's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path | str, cache_dir: Path | None, *, dtype: str = "float32", **options: Any) -> TransformersEngine:
    """The engine, on one thread unless asked for more, with its cache of digests beside the tests."""
    return TransformersEngine.load(str(folder), dtype=dtype, cache_dir=cache_dir, **({"threads": 1} | options))


def model_of(engine: TransformersEngine) -> Any:
    """The transformers model inside an engine."""
    return engine._loaded.model


def runtime_of(engine: TransformersEngine) -> TransformersRuntime:
    """The runtime inside an open engine."""
    assert engine._runtime is not None
    return engine._runtime


def some_tokens(count: int, *, seed: int = 0) -> list[int]:
    """Ordinary tokens, without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(2, VOCABULARY, (count,), generator=generator)]


def same_bits(left: Logits, right: Logits) -> bool:
    """Equality of bytes, so that NaN equals itself and 0.0 differs from -0.0."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def held(engine: TransformersEngine) -> dict[str, int]:
    """What is resident: statistics without those that only ever count up with passes."""
    counters = ("passes_served", "rows_served", "plans_built")
    return {name: count for name, count in engine.stats().items() if name not in counters}


def min_rows(engine: TransformersEngine) -> int:
    """Rows of the smallest pass."""
    return 1 if engine.report().executor == "program" else MIN_EAGER_ROWS


def chunk_files(repository: Repository) -> list[Path]:
    """The chunk files of a repository in a folder."""
    assert repository.folder is not None
    return sorted(path for path in (repository.folder / "objects").rglob("*.safetensors") if path.is_file())


@contextlib.contextmanager
def served_by(engine: TransformersEngine, serve: Callable[..., Logits]) -> Iterator[None]:
    """Passes are served by ``serve(plan_run, step, output_rows, threads=...)`` while the block runs."""
    plan = runtime_of(engine).plan
    plan.run = functools.partial(serve, plan.run)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del plan.run


@contextlib.contextmanager
def counted_rows(engine: TransformersEngine) -> Iterator[list[int]]:
    """Counts rows that the model's plan serves; one item a forward pass, padding included."""
    rows: list[int] = []

    def count(serve: Callable[..., Logits], step: Any, output_rows: Any, *, threads: int) -> Logits:
        rows.append(step.num_rows)
        return serve(step, output_rows, threads=threads)

    with served_by(engine, count):
        yield rows
