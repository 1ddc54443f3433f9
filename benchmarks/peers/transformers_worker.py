"""transformers: ``generate`` with its own cache and ``sdpa`` attention, bfloat16, eager; forks by repeating the cache over the batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from protocol import WARM_STEPS, Command, lane_prompts, serve, tokens
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when each step of ``generate`` was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_rest: Any) -> torch.Tensor:
        """Note the time."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """A model, and for each case the cache with its prompts processed, kept from round to round."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._prepared: dict[tuple[int, int, bool], DynamicCache] = {}

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {"version": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}

    def prefill(self, context: int, salt: int) -> dict[str, float]:
        """A prompt to its first token."""
        prompt = torch.tensor([tokens(context, salt)])
        started = time.perf_counter()
        self._generate(prompt, None, 1)
        return {"seconds": time.perf_counter() - started}

    def decode(self, lanes: int, context: int, is_shared: bool, steps: int) -> dict[str, float]:
        """Steps of all lanes together, after their prompts."""
        prompts = torch.tensor(lane_prompts(lanes, context, is_shared))
        cache = self._prepare(lanes, context, is_shared, prompts)
        times = self._generate(prompts, cache, WARM_STEPS + steps)
        cache.crop(context - cache.get_seq_length())
        return {"seconds": times[-1] - times[WARM_STEPS - 1], "tokens": lanes * steps}

    @torch.inference_mode()
    def _prepare(self, lanes: int, context: int, is_shared: bool, prompts: torch.Tensor) -> DynamicCache:
        """A cache in which every lane stands after its first ``context`` tokens."""
        key = (lanes, context, is_shared)
        if key not in self._prepared:
            cache = DynamicCache(config=self._model.config)
            known = prompts[: 1 if is_shared else lanes, :context]
            self._model(input_ids=known, cache=cache, use_cache=True, logits_to_keep=1)
            if is_shared and lanes > 1:
                cache = copy.deepcopy(cache)
                cache.batch_repeat_interleave(lanes)
            self._prepared[key] = cache
        return self._prepared[key]

    def _generate(self, prompts: torch.Tensor, cache: DynamicCache | None, count: int) -> list[float]:
        """When each of ``count`` new tokens was there."""
        clock = Clock()
        config = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        given = {} if cache is None else {"cache": cache}
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
            **given,
        )
        return clock.times


def load(options: Mapping[str, Any]) -> dict[str, Command]:
    """Load, and run each kind of request once."""
    engine = Transformers(options)
    engine.prefill(64, 0)
    return {"describe": engine.describe, "prefill": engine.prefill, "decode": engine.decode}


if __name__ == "__main__":
    serve(load)
