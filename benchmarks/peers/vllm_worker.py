"""vLLM on a CPU: bfloat16, prefix caching, compiled, its engine inside this process so that every step is timed by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from protocol import WARM_STEPS, Command, lane_prompts, serve, tokens


class Vllm:
    """One engine; requests are added and stepped by hand."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        self._threads = options["threads"]
        self._engine = vllm.LLM(
            options["model"],
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine
        self._count = 0

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {
            "version": self._vllm.__version__,
            "threads": self._threads,
            "preload": os.environ.get("LD_PRELOAD", ""),
        }

    def prefill(self, context: int, salt: int) -> dict[str, float]:
        """A prompt to its first token."""
        prompt = tokens(context, salt)
        started = time.perf_counter()
        self._run([prompt], 1)
        return {"seconds": time.perf_counter() - started}

    def decode(self, lanes: int, context: int, is_shared: bool, steps: int) -> dict[str, float]:
        """Steps of all lanes together, after their prompts."""
        prompts = lane_prompts(lanes, context, is_shared)
        self._run([prompt[:-1] for prompt in (prompts[:1] if is_shared else prompts)], 1)
        names = [self._add(prompt, steps + WARM_STEPS + 16) for prompt in prompts]
        seen = dict.fromkeys(names, 0)
        while min(seen.values()) < WARM_STEPS:
            self._step(seen)
        before, started = sum(seen.values()), time.perf_counter()
        for _ in range(steps):
            self._step(seen)
        elapsed = time.perf_counter() - started
        after = sum(seen.values())
        while self._engine.has_unfinished_requests():
            self._step(seen)
        return {"seconds": elapsed, "tokens": after - before}

    def _step(self, seen: dict[str, int]) -> None:
        for output in self._engine.step():
            if output.request_id not in seen:
                raise RuntimeError(f"vLLM answers for {output.request_id}, asked were {sorted(seen)}")
            seen[output.request_id] = len(output.outputs[0].token_ids)

    def _add(self, prompt: Sequence[int], count: int) -> str:
        self._count += 1
        name = str(self._count)
        parameters = self._vllm.SamplingParams(
            temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        given = self._vllm.TokensPrompt(prompt_token_ids=list(prompt))
        self._engine.add_request(name, given, parameters)
        return name

    def _run(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        for prompt in prompts:
            self._add(prompt, count)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def load(options: Mapping[str, Any]) -> dict[str, Command]:
    """Load, and run each kind of request once. The first load ever compiles for minutes."""
    engine = Vllm(options)
    engine.prefill(64, 0)
    return {"describe": engine.describe, "prefill": engine.prefill, "decode": engine.decode}


if __name__ == "__main__":
    serve(load)
