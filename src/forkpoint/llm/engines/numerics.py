"""Settings of torch that a process shares and that change the bits of a pass: recorded at load, held to at every pass.

The number of threads is set back to that of the load. Automatic casting is switched off for the pass. Anything else that was changed since
is refused with its name, because what follows would not be what the execution identity promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forkpoint.errors import Incompatible
from forkpoint.state.canonical import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How torch computes in this process."""

    threads: int
    default_dtype: str
    matmul_precision: str
    mkldnn: bool
    deterministic: bool
    flash_attention: bool
    math_attention: bool

    @staticmethod
    def current() -> Numerics:
        """The settings as they are now."""
        return Numerics(
            threads=torch.get_num_threads(),
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            matmul_precision=torch.get_float32_matmul_precision(),
            mkldnn=bool(torch.backends.mkldnn.enabled),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            flash_attention=bool(torch._C._get_flash_sdp_enabled()),
            math_attention=bool(torch._C._get_math_sdp_enabled()),
        )

    def to_record(self, *, with_threads: bool) -> Record:
        """Part of an execution identity; without the number of threads where it was found to change nothing."""
        return {name: getattr(self, name) for name in self.__slots__ if with_threads or name != "threads"}

    @contextmanager
    def held(self, device: torch.device, *, threads: int | None = None) -> Iterator[int]:
        """Run a pass under these settings, on ``threads`` instead where that is given; yields the number of threads.

        Raises:
            Incompatible: ``incompatible.settings`` naming a setting that was changed since the model was loaded.
        """
        wanted = self.threads if threads is None else threads
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
        now = Numerics.current()
        for name in self.__slots__:
            have, want = getattr(now, name), getattr(self, name)
            if name != "threads" and have != want:
                raise Incompatible(
                    f"torch's {name} is {have} but was {want} when the model was loaded; set it back, or load the model again",
                    code="settings", field=name, have=str(have), want=str(want),
                )  # fmt: skip
        try:
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):
                yield wanted
        finally:
            if wanted != self.threads:
                torch.set_num_threads(self.threads)
