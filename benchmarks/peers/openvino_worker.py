"""OpenVINO GenAI: its continuous-batching pipeline over the float16 GGUF, with prefix caching and its default precisions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import WARM_STEPS, Command, lane_prompts, serve, tokens


class OpenVino:
    """One pipeline; requests are added and stepped by hand, so that a decode step is timed by itself."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 4096
        properties = {"INFERENCE_NUM_THREADS": options["threads"], "NUM_STREAMS": 1}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)
        self._threads = options["threads"]
        self._count = 0

    def describe(self) -> dict[str, Any]:
        """Version and settings."""
        return {"version": openvino_genai.__version__, "openvino": openvino.__version__, "threads": self._threads}

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
        handles = [self._add(prompt, steps + WARM_STEPS + 16) for prompt in prompts]
        seen = [0] * lanes
        while min(seen) < WARM_STEPS:
            self._step(handles, seen)
        before, started = sum(seen), time.perf_counter()
        for _ in range(steps):
            self._step(handles, seen)
        elapsed = time.perf_counter() - started
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {"seconds": elapsed, "tokens": sum(seen) - before}

    def _step(self, handles: Sequence[Any], seen: list[int]) -> None:
        self._pipeline.step()
        for lane, handle in enumerate(handles):
            while handle.can_read():
                seen[lane] += sum(len(output.generated_ids) for output in handle.read().values())

    def _add(self, prompt: Sequence[int], count: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        self._count += 1
        return self._pipeline.add_request(self._count, openvino.Tensor(np.array([prompt], np.int64)), config)

    def _run(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        handles = [self._add(prompt, count) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for handle in handles:
            while handle.can_read():
                handle.read()


def load(options: Mapping[str, Any]) -> dict[str, Command]:
    """Load, and run each kind of request once."""
    engine = OpenVino(options)
    engine.prefill(64, 0)
    return {"describe": engine.describe, "prefill": engine.prefill, "decode": engine.decode}


if __name__ == "__main__":
    serve(load)
