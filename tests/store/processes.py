"""Python programs that tests of the store run beside themselves, to be killed or limited."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import forkpoint

PRELUDE = """
import os, sys
from pathlib import Path
from forkpoint.errors import Error
from forkpoint.ids import ObjectKind, digest_of
from forkpoint.store.base import NewObject
from forkpoint.store.local import LocalStore

CHUNK = ObjectKind.CHUNK
root = Path(sys.argv[1])

def new(*parts):
    return NewObject(kind=CHUNK, parts=parts)

def say(text):
    print(text, flush=True)
"""


def start(program: str, root: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``program``, which finds ``root`` and the names of the prelude, with pipes for its input and output."""
    source = str(Path(forkpoint.__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(root), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
        text=True,
    )


def run(program: str, root: Path, *arguments: str) -> list[str]:
    """Run ``program`` to its end and return the lines it said; it must succeed."""
    with start(program, root, *arguments) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said.splitlines()
