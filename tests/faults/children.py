"""Child processes for tests of sudden death: forked for many short lives, started afresh where the interpreter matters."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from forkpoint.ids import ManifestId
from forkpoint.repo.repository import Repository

ROOT = Path(__file__).parents[2]


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child and wait; its exit status, negative for a signal. The child opens what it needs itself."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - a forked child must not return into the tests
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(module: str, *arguments: str, hash_seed: int = 0) -> subprocess.Popen[str]:
    """Start ``python -m module`` with its output on a pipe."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def assert_sound(repo: Repository) -> None:
    """Every ref leads to something complete, and fsck finds nothing but leftovers."""
    findings = [each for each in repo.check() if each.severity != "info"]
    assert findings == []
    for ref in [*repo.branches(), *repo.tags()]:
        repo.verify(ref.ref)


def ancestry(repo: Repository, name: str) -> set[ManifestId]:
    return {entry.row.manifest_id for entry in repo.log(name)}
