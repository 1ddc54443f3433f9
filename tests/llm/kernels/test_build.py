"""The compiled kernels are found, and what the environment says about them is heeded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkpoint.config import Config
from forkpoint.llm.kernels.native import find_native, instruction_set

ROOT = Path(__file__).parents[3]
SHOW = "from forkpoint.llm.kernels.native import *; print(instruction_set())"


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SHOW], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_the_switches_are_read_from_the_environment() -> None:
    config = Config.from_environment({"FORKPOINT_KERNELS": "torch", "FORKPOINT_ISA": "avx2"})
    assert (config.kernels, config.instruction_set) == ("torch", "avx2")
    config = Config.from_environment({"FORKPOINT_KERNELS": ""})
    assert (config.kernels, config.instruction_set) == (None, None)


def test_torch_serves_when_it_is_asked_for() -> None:
    assert run(FORKPOINT_KERNELS="torch").stdout.strip() == "torch"


@pytest.mark.skipif(find_native() is None, reason="the native kernels were not built")
def test_a_lower_instruction_set_can_be_chosen() -> None:
    assert run(FORKPOINT_ISA="portable").stdout.strip() == "portable"
    assert instruction_set() in ("avx512_bf16", "avx512", "avx2", "portable")


@pytest.mark.skipif(find_native() is None, reason="the native kernels were not built")
@pytest.mark.parametrize("setting", [{"FORKPOINT_KERNELS": "cuda"}, {"FORKPOINT_ISA": "sse9"}])
def test_settings_that_mean_nothing_are_refused(setting: dict[str, str]) -> None:
    refused = run(**setting)
    assert refused.returncode != 0
    assert "InvalidInput" in refused.stderr


def test_the_setup_rebuilds_when_a_native_source_changes() -> None:
    stamp = (ROOT / "scripts" / "setup").read_text()
    assert "native/*" in stamp
    assert "CMakeLists.txt" in stamp


@pytest.mark.skipif(find_native() is None, reason="the native kernels were not built")
def test_every_compiled_kernel_leads_to_one_openmp_only() -> None:
    """Two would start twice the threads, which then wait for one another's processors."""
    script = (
        "from forkpoint.llm.kernels.native import find_native; find_native();"
        "print(sum('libgomp.so.1' == line.split('/')[-1].strip() for line in {m.split()[-1] for m in open('/proc/self/maps')}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(shown.stdout) <= 1
