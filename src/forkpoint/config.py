"""What the environment says, read in one place. Nothing else in Forkpoint looks at environment variables.

FORKPOINT_DIR         the folder that holds the repository (or one below it); default: found from the current folder upwards
FORKPOINT_WHO         the name that ref moves are recorded under; default: user@host
FORKPOINT_CACHE_DIR   dequantised models, digests of model files; default: forkpoint in the XDG cache folder
FORKPOINT_KERNELS     "torch" runs torch's versions of the kernels although compiled ones are there; default: native where built
FORKPOINT_ISA         the instruction set of the compiled kernels: portable, avx2, avx512 or avx512_bf16; default: the best here
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of this process. ``repository_dir``, ``kernels`` and ``instruction_set`` are None when the environment names none."""

    repository_dir: Path | None
    who: str
    cache_dir: Path
    kernels: str | None = None
    instruction_set: str | None = None

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Config:
        """Read the settings from ``environment``, by default that of this process. Empty values count as absent."""
        values = os.environ if environment is None else environment
        folder = values.get("FORKPOINT_DIR")
        return Config(
            repository_dir=Path(folder) if folder else None,
            who=values.get("FORKPOINT_WHO") or _user_at_host(),
            cache_dir=_cache_dir(values),
            kernels=values.get("FORKPOINT_KERNELS") or None,
            instruction_set=values.get("FORKPOINT_ISA") or None,
        )


def _cache_dir(values: Mapping[str, str]) -> Path:
    folder = values.get("FORKPOINT_CACHE_DIR")
    if folder:
        return Path(folder)
    base = values.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forkpoint"


def _user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no password entry and no LOGNAME, USER or the like: containers
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
