"""Restore, commit, catalog and start-up: the figures of the foundation. ``python benchmarks/state.py [--quick] [--json FILE] [--no-peers]``

SmolLM2-135M in bfloat16 on 2 threads. Ratios compare what was measured in turn in one run; medians.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from forkpoint.catalog.records import ChunkRow, ManifestRow, MoveRow, ParentEdge, PrefixRow
from forkpoint.ids import ObjectId, digest_of
from forkpoint.repo.repository import Repository
from forkpoint.state.fingerprint import Fingerprint
from forkpoint.state.prefix import prefix_keys
from reporting import Report, arguments, interleaved, seconds

PREFIX_TOKENS = 2048
TAIL_TOKENS = 52
TOKENS = [(7 * index) % 40_000 + 100 for index in range(PREFIX_TOKENS + TAIL_TOKENS + 1)]
MODEL = "bundled:smollm2"


def main() -> None:
    """Measure and report."""
    options = arguments("Forkpoint: state")
    report = Report()
    with _scratch() as folder:
        start_up(report, folder, options.quick)
        catalog(report, folder, options.quick)
        memory_of_restore(report, folder)
        state(report, folder, options.quick, with_peers=not options.no_peers)
    report.write(options.json)


# ---- restore and commit ----


def state(report: Report, folder: Path, is_quick: bool, *, with_peers: bool) -> None:
    """Restore against recomputation, commit against a plain write, and what a second commit writes."""
    from forkpoint.llm import TransformersEngine

    engine = TransformersEngine.load(MODEL, dtype="bfloat16", threads=2)
    prompt = TOKENS[: PREFIX_TOKENS + 1]
    stored = Repository.create(folder / "stored")
    base = engine.start(prompt)
    base.commit(stored, "main")
    state_bytes = base.state_bytes
    fresh = itertools.count()

    def recompute() -> float:
        return seconds(lambda: engine.start(prompt))

    def restore() -> float:
        # A repository opened anew has verified nothing yet: every digest is computed inside the measured call.
        with Repository.open(folder / "stored") as repository:
            return seconds(lambda: engine.checkout(repository, "main"))

    repetitions = 3 if is_quick else 7
    times = interleaved(
        repetitions, recompute=recompute, restore=lambda: statistics.median(restore() for _ in range(5))
    )
    report.add("recompute 2,048 tokens", times["recompute"] * 1e3, "ms")
    report.add("restore 2,048 tokens, verified", times["restore"] * 1e3, "ms")
    report.add("restore against recompute", times["recompute"] / times["restore"], "x", at_least=60)
    report.add("restore", state_bytes / times["restore"] / 1e9, "GB/s", at_least=2)

    def commit() -> float:
        value = engine.start(prompt)
        with Repository.create(folder / f"commit-{next(fresh)}") as repository:
            return seconds(lambda: value.commit(repository, "main"))

    def plain() -> float:
        data = os.urandom(1 << 20) * (state_bytes >> 20)
        return seconds(lambda: _write_and_sync(folder / f"plain-{next(fresh)}", data)) * state_bytes / len(data)

    times = interleaved(repetitions, plain=plain, commit=commit)
    report.add("plain write + fsync of the same bytes", state_bytes / times["plain"] / 1e9, "GB/s")
    report.add("capture and durable commit", state_bytes / times["commit"] / 1e9, "GB/s")
    report.add("commit against plain write + fsync", times["plain"] / times["commit"], "x", at_least=0.5)

    grown = base.extend(TOKENS[PREFIX_TOKENS + 1 :])
    published = grown.commit(stored, "main")
    tail = (grown.position - PREFIX_TOKENS) * sum(group.token_bytes for group in engine.groups)
    report.add(
        "commit of 2,100 tokens, 2,048 stored: bytes over the tail's own",
        published.bytes_written / tail,
        "x",
        at_most=1.05,
    )
    report.add("commit of 2,100 tokens, 2,048 stored: chunks written", published.chunks_written, "chunks", at_most=1)
    started = time.perf_counter()
    for _ in range(100):
        base.fork()
    report.add("fork", (time.perf_counter() - started) * 1e4, "us")
    if with_peers:
        _peers(report, folder, state_bytes, repetitions)
    stored.close()


def _peers(report: Report, folder: Path, state_bytes: int, repetitions: int) -> None:
    """What a user of transformers does today: copy the cache, or save and load it, unverified and under no name."""
    import copy

    import torch
    from transformers import DynamicCache

    layers = [torch.randn(2, 1, 3, PREFIX_TOKENS, 64).to(torch.bfloat16) for _ in range(30)]
    cache = DynamicCache()
    for index, layer in enumerate(layers):
        cache.update(layer[0].clone(), layer[1].clone(), index)
    path = folder / "peer.pt"
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    times = interleaved(
        repetitions,
        copy=lambda: seconds(lambda: copy.deepcopy(cache)),
        save=lambda: seconds(lambda: torch.save(tensors, path)),
        load=lambda: seconds(lambda: torch.load(path, weights_only=True)),
    )
    report.add("peer: transformers deepcopy of the cache", times["copy"] * 1e3, "ms")
    report.add("peer: torch.save (no fsync, no digest)", state_bytes / times["save"] / 1e9, "GB/s")
    report.add("peer: torch.load (no digest)", state_bytes / times["load"] / 1e9, "GB/s")


def _write_and_sync(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


# ---- memory ----


def memory_of_restore(report: Report, folder: Path) -> None:
    """Peak of anonymous memory during a restore, over what the state itself takes. In a process that held no state before."""
    with Repository.create(folder / "memory"):
        pass
    run = partial(subprocess.run, capture_output=True, text=True, check=True)
    run([sys.executable, __file__, "--memory-commit", str(folder / "memory")])
    printed = run([sys.executable, __file__, "--memory-restore", str(folder / "memory")]).stdout
    peak, state_bytes, chunk_bytes = map(int, printed.split())
    report.add("peak memory of a restore over state + one chunk", peak / (state_bytes + chunk_bytes), "x", at_most=1.02)


def memory_commit(folder: Path) -> None:
    """Commit the state that :func:`memory_restore` restores. A load measures the model once; the next one knows."""
    from forkpoint.llm import TransformersEngine

    engine = TransformersEngine.load(MODEL, dtype="bfloat16", threads=1)
    with Repository.open(folder) as repository:
        engine.start(TOKENS[: PREFIX_TOKENS + 1]).commit(repository, "main")


def memory_restore(folder: Path) -> None:
    """Restore a state and print the peak: growth of RssAnon, state bytes, bytes of one chunk."""
    from forkpoint.llm import TransformersEngine

    engine = TransformersEngine.load(MODEL, dtype="bfloat16", threads=1)
    with Repository.open(folder) as repository:
        before, peak, done = _anonymous_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, _anonymous_bytes())
                time.sleep(0.0005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        value = engine.checkout(repository, "main")
        done.set()
        watcher.join()
        manifest = repository.manifest(repository.resolve("main"))
        print(
            max(peak, _anonymous_bytes()) - before,
            value.state_bytes,
            max(chunk.num_bytes for chunk in manifest.chunks()),
        )


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


# ---- start-up and catalog ----


def start_up(report: Report, folder: Path, is_quick: bool) -> None:
    """Time to import, and to print a long log, whole processes."""
    repetitions = 5 if is_quick else 15
    command = [sys.executable, "-c", "pass"]
    bare = statistics.median(seconds(lambda: subprocess.run(command, check=True)) for _ in range(repetitions))
    for module in ("forkpoint", "forkpoint.repo.repository"):
        command = [sys.executable, "-c", f"import {module}"]
        whole = statistics.median(seconds(lambda: subprocess.run(command, check=True)) for _ in range(repetitions))  # noqa: B023
        report.add(f"import {module}", whole - bare, "s", at_most=0.3 if module == "forkpoint" else None)
    with Repository.create(folder / "log") as repository:
        _fill(repository, 10_000)
    command = [sys.executable, "-m", "forkpoint.cli.main", "log", "-C", str(folder / "log")]
    # As an installed package runs: with its modules compiled, and output that is not written byte by byte.
    plain = {name: value for name, value in os.environ.items() if name not in _SLOWING}
    lines = subprocess.run(command, check=True, capture_output=True, text=True, env=plain).stdout
    whole = statistics.median(
        seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=plain))
        for _ in range(repetitions)
    )
    report.add(
        f"forkpoint log of 10,000 continuations ({lines.count(chr(10)):,} lines), whole process",
        whole,
        "s",
        at_most=0.5,
    )


def catalog(report: Report, folder: Path, is_quick: bool) -> None:
    """A catalog of 100,000 continuations: moving a ref and finding a prefix."""
    size = 10_000 if is_quick else 100_000
    with Repository.create(folder / "catalog") as repository:
        ids = _fill(repository, size)
        repetitions = 20 if is_quick else 100
        moves = [
            seconds(partial(repository.branch, "work", ids[index], expect="anything")) for index in range(repetitions)
        ]
        report.add(f"ref move, catalog of {size:,}", statistics.median(moves) * 1e3, "ms", at_most=5)
        keys = list(prefix_keys(_FINGERPRINT.state_id, repository.namespace, range(PREFIX_TOKENS)))
        with repository.catalog.transaction(reason="benchmark") as tx:
            tx.add_prefixes(
                PrefixRow(
                    key=key,
                    execution_id=_FINGERPRINT.execution_id,
                    group="attention.00",
                    index=index,
                    chunk_id=_number_id("chunk", index),
                )
                for index, key in enumerate(keys)
            )
        look = lambda: repository.catalog.longest_prefix(keys, _FINGERPRINT.execution_id, ["attention.00"])  # noqa: E731
        assert look().num_chunks == len(keys)
        found = statistics.median(seconds(look) for _ in range(repetitions))
        report.add(f"prefix lookup of {PREFIX_TOKENS:,} tokens, catalog of {size:,}", found * 1e3, "ms", at_most=5)


_SLOWING = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
_FINGERPRINT = Fingerprint(state={"benchmark": "state"}, execution={"benchmark": "execution"})


def _fill(repository: Repository, count: int) -> list[ObjectId]:
    """A line of ``count`` continuations on ``main``, each with a chunk and a prefix of its own; catalog rows only, made in bulk."""
    ids = [_number_id("manifest", number) for number in range(count)]
    for first in range(0, count, 5_000):
        with repository.catalog.transaction(reason="benchmark") as tx:
            tx.add_manifests(_row(ids, number) for number in range(first, min(first + 5_000, count)))
            tx.add_prefixes(_prefix_row(number) for number in range(first, min(first + 5_000, count)))
    with repository.catalog.transaction(reason="benchmark") as tx:
        move = MoveRow(
            move_id=_number_id("move", 0), previous=None, ref="refs/heads/main", old=None, new=ids[-1], tx=tx.number, at_us=tx.at_us,
            who="benchmark", message="filled", is_trusted=True,
        )  # fmt: skip
        tx.set_ref("refs/heads/main", target=ids[-1], move=move)
    return ids


def _row(ids: list[ObjectId], number: int) -> ManifestRow:
    return ManifestRow(
        manifest_id=ids[number],
        kind="llm",
        state_id=_FINGERPRINT.state_id,
        execution_id=_FINGERPRINT.execution_id,
        position=256 * (number % 64 + 1),
        pending=number % 49_152,
        num_bytes=5_898_240,
        message=f"turn {number}",
        is_trusted=True,
        tokenizer_id=None,
        parents=(ParentEdge(role="continues", manifest_id=ids[number - 1]),) if number else (),
        introduced=(ChunkRow(chunk_id=_number_id("chunk", number), num_bytes=5_898_240),),
    )


def _prefix_row(number: int) -> PrefixRow:
    chunk_id, key = _number_id("chunk", number), _number_id("key", number)
    return PrefixRow(
        key=key, execution_id=_FINGERPRINT.execution_id, group="attention.00", index=number % 64, chunk_id=chunk_id
    )


def _number_id(what: str, number: int) -> ObjectId:
    return digest_of([f"{what} {number}".encode()])


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-benchmark-", dir=os.environ.get("FORKPOINT_BENCHMARK_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory-commit"]:
        memory_commit(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--memory-restore"]:
        memory_restore(Path(sys.argv[2]))
    else:
        main()
