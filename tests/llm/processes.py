"""Programs that tests of language models run in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import forkpoint

PRELUDE = """
import hashlib, json, os, signal, sys
import transformers
from pathlib import Path
from forkpoint.llm import Sampling
from forkpoint.repo.repository import Repository
from tests.llm.models import counted_rows, load, min_rows, model_of, some_tokens

transformers.utils.logging.disable_progress_bar()
given = json.loads(sys.argv[1])

def digest(logits):
    return hashlib.sha256(logits.tobytes()).hexdigest()

def say(value):
    print(json.dumps(value), flush=True)
"""


def start(program: str, given: object, **environment: str) -> subprocess.Popen[str]:
    """Start ``program``, which finds ``given`` and the names of the prelude."""
    source, tests = Path(forkpoint.__file__).parents[1], Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), json.dumps(given)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{tests}", **environment},
        text=True,
    )


def run(program: str, given: object, *, expect: int = 0, **environment: str) -> Any:
    """Run ``program`` to its end and return the last value it said; ``expect`` is its exit status."""
    with start(program, given, **environment) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == expect, said
    return json.loads(said.splitlines()[-1])
