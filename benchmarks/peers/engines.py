"""The engines that are compared: how each is started, and all of them together, asked one at a time."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from peers.contention import Contention
from peers.process import EngineFailed, EngineProcess, EngineSpec

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PLACE = ROOT / ".benchmark-peers"
OURS = "forkpoint"
PEERS = ("openvino", "vllm", "llama bf16", "llama f16", "transformers")


def ours(name: str, threads: int, **load: Any) -> EngineSpec:
    """Forkpoint, loaded with these arguments."""
    return _spec(name, ROOT / ".venv", "forkpoint_worker.py", {"threads": threads, "load": load})


def limits(threads: int) -> EngineSpec:
    """What the machine can do at most."""
    return _spec("limits", ROOT / ".venv", "limits_worker.py", {"threads": threads})


def peers(threads: int) -> list[EngineSpec]:
    """Every peer in the order of ``PEERS``, those that are not installed too."""
    folder, bf16, f16 = (PLACE / "model" / name for name in ("bfloat16", "bfloat16.gguf", "float16.gguf"))
    return [
        _spec("openvino", PLACE / "openvino", "openvino_worker.py", {"threads": threads}, model=f16),
        _spec("vllm", PLACE / "vllm", "vllm_worker.py", {"threads": threads}, model=folder, **_vllm_environment(threads)),
        _spec("llama bf16", PLACE / "llama", "llama_worker.py", {"threads": threads}, model=bf16),
        _spec("llama f16", PLACE / "llama", "llama_worker.py", {"threads": threads}, model=f16),
        _spec("transformers", ROOT / ".venv", "transformers_worker.py", {"threads": threads}, model=folder),
    ]  # fmt: skip


def _spec(
    name: str, environment: Path, script: str, options: dict[str, Any], model: Path | None = None, **variables: str
) -> EngineSpec:
    python = environment / "bin" / "python"
    missing = next(
        (str(path.relative_to(ROOT)) for path in (python, model) if path is not None and not path.exists()), None
    )
    return EngineSpec(
        name=name,
        command=[str(python), str(HERE / script)],
        options=options if model is None else {**options, "model": str(model)},
        environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables},
        missing=None if missing is None else f"there is no {missing}; run benchmarks/peers/setup",
    )


def _vllm_environment(threads: int) -> dict[str, str]:
    """As vLLM's documentation of CPUs advises: threads bound to cores, tcmalloc and Intel's OpenMP loaded before all else."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    libraries = [*PLACE.glob("preload/usr/lib/*/libtcmalloc_minimal.so.4"), *PLACE.glob("vllm/lib/libiomp5.so")]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(PLACE / "vllm-cache"),
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }


class Engines:
    """Engines that are loaded and asleep. One that fails is ended, said to be failed, and asked no more."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._stack = contextlib.ExitStack()
        self._logs = Path(tempfile.mkdtemp(prefix="forkpoint-benchmark-"))
        self._running: dict[str, EngineProcess] = {}
        self.contention = Contention()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def start(self, specs: Iterable[EngineSpec]) -> dict[str, Any]:
        """Load engines, all at once; by name what each says of itself. What cannot be loaded is noted."""
        loading = []
        for spec in specs:
            if spec.missing is not None:
                self._note(spec.name, spec.missing)
                continue
            process = EngineProcess(spec, self._logs / f"{spec.name.replace(' ', '-')}.log")
            self._stack.callback(process.close)
            self._running[spec.name] = process
            loading.append(process)
        found = {}
        for process in loading:
            with self._noting(process.name):
                found[process.name] = process.started()
        return found

    def end(self, name: str) -> None:
        """End an engine that is asked no more; nothing happens where it is not running."""
        if name in self._running:
            self._running.pop(name).close()

    def running(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that can be asked."""
        return [name for name in names if name in self._running]

    def ask(self, name: str, do: str, **arguments: Any) -> Any | None:
        """One answer; None from an engine that is not there or just failed."""
        if name not in self._running:
            return None
        answer = None
        with self._noting(name), self.contention.watched(self._running[name].process_id):
            answer = self._running[name].call(do, **arguments)
        return answer

    def rates(self, names: Sequence[str], rounds: int, do: str, **arguments: Any) -> dict[str, float]:
        """Median tokens a second of each engine, asked in turn in every round."""
        samples: dict[str, list[float]] = {}
        for number in range(rounds):
            # A prompt that a cache could know would not be computed: every round has one of its own.
            fresh = {"salt": 10_000 + number} if do == "prefill" else {}
            for name in self.running(names):
                answer = self.ask(name, do, **arguments, **fresh)
                if answer is not None:
                    samples.setdefault(name, []).append(answer.get("tokens", arguments["context"]) / answer["seconds"])
        return {name: statistics.median(values) for name, values in samples.items() if name in self._running}

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except EngineFailed as error:
            self._note(name, str(error))
            self._running.pop(name).close()
