"""Leftovers of dead writers are swept, those of live ones never."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from forkpoint.store.staging import Staging, sweep

DEAD = "123-0123456789abcdef"


def test_a_sweep_spares_a_live_writer_and_takes_a_dead_one(tmp_path: Path) -> None:
    staging = Staging(tmp_path)
    path, _ = staging.create()
    for suffix in ("lock", "0", "12"):
        (tmp_path / f"{DEAD}.{suffix}").write_text("left")
    assert sweep(tmp_path) == 3
    assert Path(path).exists()
    assert len(list(tmp_path.iterdir())) == 2
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_takes_files_whose_lock_is_gone(tmp_path: Path) -> None:
    (tmp_path / f"{DEAD}.0").write_text("left")
    assert sweep(tmp_path) == 1


def test_a_sweep_leaves_names_alone_that_are_not_ours(tmp_path: Path) -> None:
    for name in ("notes.txt", f"{DEAD}.txt", "x.lock", f"{DEAD}.0.bak", "123-0123.0"):
        (tmp_path / name).write_text("somebody's")
    assert sweep(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 5


def test_a_sweep_of_an_absent_folder_finds_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "absent") == 0


def test_a_writer_whose_lock_file_was_swept_before_it_was_locked_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    swept: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.glob("*.lock"))
            swept[0].unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    staging = Staging(tmp_path)
    path, _ = staging.create()
    assert Path(path).with_suffix(".lock").exists()
    assert Path(path).with_suffix(".lock") != swept[0]
    assert sweep(tmp_path) == 0
    staging.close()


def test_a_moved_file_is_kept_and_the_others_removed(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    staging = Staging(folder)
    moved, _ = staging.create()
    staging.create()
    staging.move(moved, tmp_path / "kept")
    staging.close()
    assert (tmp_path / "kept").exists()
    assert list(folder.iterdir()) == []
