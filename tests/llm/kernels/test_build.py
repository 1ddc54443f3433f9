"""The compiled kernels are found, and what the environment says about them is heeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.config import Config
from forkpoint.errors import InvalidInput
from forkpoint.llm.kernels.native import find_native, instruction_set

ROOT = Path(__file__).parents[3]
NATIVE = find_native()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the native kernels were not built")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = instruction_set()
    yield
    find_native.cache_clear()
    if NATIVE is not None:
        NATIVE.use_instruction_set(before)


def test_the_switches_are_read_from_the_environment() -> None:
    config = Config.from_environment({"FORKPOINT_KERNELS": "torch", "FORKPOINT_ISA": "avx2"})
    assert (config.kernels, config.instruction_set) == ("torch", "avx2")
    config = Config.from_environment({"FORKPOINT_KERNELS": ""})
    assert (config.kernels, config.instruction_set) == (None, None)


def test_torch_serves_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKPOINT_KERNELS", "torch")
    find_native.cache_clear()
    assert find_native() is None
    assert instruction_set() == "torch"


@needs_native
def test_a_lower_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKPOINT_ISA", "portable")
    find_native.cache_clear()
    assert instruction_set() == "portable"


@needs_native
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("FORKPOINT_KERNELS", "cuda", "kernels"), ("FORKPOINT_ISA", "sse9", "instruction_set")],
)
def test_settings_that_mean_nothing_are_refused(
    name: str, value: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    find_native.cache_clear()
    with pytest.raises(InvalidInput) as refused:
        find_native()
    assert refused.value.code == f"invalid_input.{code}"


def test_the_setup_rebuilds_when_a_native_source_changes() -> None:
    stamp = next(line for line in (ROOT / "scripts" / "setup").read_text().splitlines() if line.startswith("want="))
    assert "native/*" in stamp
    assert "CMakeLists.txt" in stamp


@needs_native
def test_the_kernels_share_the_openmp_of_torch() -> None:
    """Two would start twice the threads, which then wait for one another's processors."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    files = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    assert len([file for file in files if Path(file).name == "libgomp.so.1"]) <= 1
