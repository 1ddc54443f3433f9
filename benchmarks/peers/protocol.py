"""The lines between the benchmark and an engine's own process. Standard library only: it runs in every peer's environment.

A request is one JSON object a line: ``{"do": "prefill", ...arguments}``. The answer is one line too: ``{"value": ...}`` or
``{"error": "..."}``.
Whatever the engine prints goes to the process's error output, never between the answers.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Command = Callable[..., Any]

_PR_SET_PDEATHSIG = 1

PREFIX_SALT = 1
"""Prompts of this salt are the prefix that forks share; unrelated lanes have salts of their own."""

WARM_STEPS = 3
"""Steps before the measured ones: a process that was stopped has cold caches and sleeping threads."""


def tokens(count: int, salt: int) -> list[int]:
    """``count`` token ids in [100, 48,100), the same for the same salt; other salts differ from the first token on."""
    state = (salt * 2_654_435_761 + 97) % 2**32
    found = []
    for _ in range(count):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        found.append(100 + (state >> 8) % 48_000)
    return found


def lane_prompts(lanes: int, context: int, is_shared: bool) -> list[list[int]]:
    """For each lane ``context`` tokens and one more of its own: of one prefix, or unrelated from the first token on."""
    return [
        [*tokens(context, PREFIX_SALT if is_shared else 100 + lane), 200 + lane] for lane in range(lanes)
    ]  # fmt: skip


def serve(load: Callable[[Mapping[str, Any]], Mapping[str, Command]]) -> None:
    """Load an engine with the options of the command line, then answer until the input ends.

    Args:
        load: from options to commands by name; what the command ``describe`` gives is the answer to the start.
    """
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands: Mapping[str, Command] = {}

    def start() -> Any:
        nonlocal commands
        commands = load(json.loads(sys.argv[1]))
        return commands["describe"]()

    if _answer(answers, start):
        for line in sys.stdin:
            _answer(answers, lambda line=line: _obey(commands, json.loads(line)))
    answers.close()


def _end_with_parent() -> None:
    """Be killed when the benchmark ends in whatever way: a stopped process would not notice that its input ended. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _obey(commands: Mapping[str, Command], request: dict[str, Any]) -> Any:
    return commands[request.pop("do")](**request)


def _answer(answers: TextIO, work: Callable[[], Any]) -> bool:
    """Write what the work gave, or how it failed; returns whether it succeeded."""
    try:
        line = {"value": work()}
    except Exception as error:  # noqa: BLE001 - the other process decides what a failure means
        traceback.print_exc()
        line = {"error": f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]}
    answers.write(json.dumps(line) + "\n")
    answers.flush()
    return "value" in line
