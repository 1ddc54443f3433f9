"""The compiled kernels, where there are any: the only module that imports them.

Addresses and sizes go in, nothing is checked on the other side: the modules that call these functions check shapes first.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

import torch  # noqa: F401 (first: the kernels then share its OpenMP threads instead of starting others beside them)

from forkpoint.config import Config
from forkpoint.errors import InvalidInput

TORCH: Final = "torch"
"""The name of the instruction set where no compiled kernels run."""


@cache
def find_native() -> ModuleType | None:
    """The compiled module, or None where it was not built or ``FORKPOINT_KERNELS=torch`` forbids it.

    Raises:
        InvalidInput: ``invalid_input.kernels`` or ``invalid_input.instruction_set`` for settings that mean nothing here.
    """
    config = Config.from_environment()
    if config.kernels not in (None, "native", TORCH):
        raise InvalidInput(
            f"FORKPOINT_KERNELS is {config.kernels!r}; it may be 'native' or 'torch'",
            code="kernels",
            kernels=config.kernels,
        )
    if config.kernels == TORCH:
        return None
    try:
        native = importlib.import_module("forkpoint.llm.kernels._native")
    except ImportError:
        return None
    if config.instruction_set is not None:
        _use(native, config.instruction_set)
    return native


def instruction_set() -> str:
    """What the kernels run on, a part of the execution identity: ``avx512``, ``avx512_bf16``, ``avx2``, ``portable`` or ``torch``."""
    native = find_native()
    return TORCH if native is None else str(native.instruction_set())


def build_identity() -> str:
    """Which build of the kernels this is: changes when they are built again."""
    native = find_native()
    if native is None or native.__file__ is None:
        return TORCH
    stat = Path(native.__file__).stat()
    return f"{stat.st_size}|{stat.st_mtime_ns}"


def _use(native: ModuleType, name: str) -> None:
    try:
        native.use_instruction_set(name)
    except ValueError as error:
        raise InvalidInput(
            f"FORKPOINT_ISA is {name!r}; this processor's best is {native.best_instruction_set()!r}",
            code="instruction_set", instruction_set=name,
        ) from error  # fmt: skip
