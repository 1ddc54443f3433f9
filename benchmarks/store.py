"""How a batch of objects is best made durable, and what reading costs: the figures behind ``store/publication.py`` and ``files.py``.

``python benchmarks/store.py [--quick] [--json FILE] [--no-peers]``. Each strategy writes the same bytes in turn; medians. The local
store is one row; the others are the same steps written out plainly, so that they can be compared.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from forkpoint.ids import ObjectKind, digest_of
from forkpoint.store.base import NewObject
from forkpoint.store.files import digest_of_file
from forkpoint.store.local import LocalStore
from reporting import Report, arguments, interleaved, seconds

Strategy = Callable[[Path, Sequence[bytes]], None]


def main() -> None:
    """Measure and report."""
    options = arguments("Forkpoint: store")
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-benchmark-", dir=os.environ.get("FORKPOINT_BENCHMARK_DIR")))
    try:
        for count, size in ((8, 5_900_000), (200, 20_000)):
            writing(report, folder, count, size, 3 if options.quick else 11, with_peers=not options.no_peers)
        reading(report, folder, 5 if options.quick else 31)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.write(options.json)


def writing(report: Report, folder: Path, count: int, size: int, repetitions: int, *, with_peers: bool) -> None:
    """One batch of ``count`` objects by each strategy."""
    strategies: dict[str, Strategy] = {"one plain file, one fsync": _plain, "local store": _local_store}
    if with_peers:
        strategies |= {
            "all written, fdatasync one by one": partial(_staged, flush=_one_by_one),
            "all written, fdatasync from 4 threads": partial(_staged, flush=_from_threads),
            "all written, one syncfs": partial(_staged, flush=_syncfs),
        }

    def measure(strategy: Strategy) -> float:
        shutil.rmtree(folder / "batch", ignore_errors=True)
        (folder / "batch").mkdir()
        parts = [os.urandom(size) for _ in range(count)]
        return seconds(lambda: strategy(folder / "batch", parts))

    times = interleaved(repetitions, **{name: partial(measure, strategy) for name, strategy in strategies.items()})
    for name, elapsed in times.items():
        report.add(f"{count} x {size / 1e6:g} MB: {name}", elapsed * 1e3, "ms")
    if count == 8:
        ratio = times["one plain file, one fsync"] / times["local store"]
        report.add(f"{count} x {size / 1e6:g} MB: local store against one plain file", ratio, "x", at_least=0.6)


def reading(report: Report, folder: Path, repetitions: int) -> None:
    """Digest of a file in the page cache, and the store's first and later reads of one object."""
    data = os.urandom(5_900_000)
    path = folder / "object"
    path.write_bytes(data)
    in_memory = statistics.median(seconds(lambda: blake3(data).digest()) for _ in range(repetitions))
    fd = os.open(path, os.O_RDONLY)
    from_file = statistics.median(seconds(lambda: digest_of_file(fd, len(data))) for _ in range(repetitions))
    os.close(fd)
    report.add("BLAKE3 of 5.9 MB in memory, one thread", len(data) / in_memory / 1e9, "GB/s")
    report.add("digest of a 5.9 MB file in the page cache", len(data) / from_file / 1e9, "GB/s")
    store = LocalStore(folder / "read")
    object_id = store.put(NewObject(kind=ObjectKind.CHUNK, parts=[data])).object_id
    first = statistics.median(
        seconds(lambda: LocalStore(folder / "read").get(ObjectKind.CHUNK, object_id)) for _ in range(repetitions)
    )
    later = statistics.median(seconds(lambda: store.get(ObjectKind.CHUNK, object_id)) for _ in range(repetitions))
    report.add("store: first get of 5.9 MB, verified", first * 1e3, "ms")
    report.add("store: later get of 5.9 MB", later * 1e3, "ms")


def _plain(folder: Path, parts: Sequence[bytes]) -> None:
    with (folder / "plain").open("wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())


def _local_store(folder: Path, parts: Sequence[bytes]) -> None:
    LocalStore(folder).put_many(NewObject(kind=ObjectKind.CHUNK, parts=[part]) for part in parts)


def _staged(folder: Path, parts: Sequence[bytes], *, flush: Callable[[Sequence[int]], None]) -> None:
    """Hash and write all to temporary files, flush them by ``flush``, name them in fan-out folders, flush those."""
    names, fds = [], []
    for part in parts:
        names.append(digest_of([part])[3:])
        fds.append(os.open(folder / names[-1], os.O_CREAT | os.O_WRONLY, 0o600))
        os.write(fds[-1], part)
    flush(fds)
    for fd, name in zip(fds, names, strict=True):
        os.close(fd)
        (folder / name[:2]).mkdir(exist_ok=True)
        (folder / name).rename(folder / name[:2] / name[2:])
    for name in {name[:2] for name in names}:
        fd = os.open(folder / name, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _one_by_one(fds: Sequence[int]) -> None:
    for fd in fds:
        os.fdatasync(fd)


def _from_threads(fds: Sequence[int]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(os.fdatasync, fds))


def _syncfs(fds: Sequence[int]) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(fds[0]):
        raise OSError(ctypes.get_errno(), "syncfs")


if __name__ == "__main__":
    main()
