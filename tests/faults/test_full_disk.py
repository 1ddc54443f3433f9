"""No space left at any point of a publication: a typed error, nothing advertised, and a retry succeeds once there is space."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.children import assert_sound, in_child
from tests.repo.drafts import draft_of

from forkpoint.errors import CapacityExceeded, Error, Unavailable
from forkpoint.repo.names import Expectation
from forkpoint.repo.repository import Repository
from forkpoint.state.draft import Draft

TOKENS = list(range(300))
DISK_BYTES = 8 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path, num_free: int) -> Path:
    """A file that leaves ``num_free`` bytes of the disk."""
    ballast = path / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - num_free))
    return ballast


def refusal_of(repo: Repository, draft: Draft, expect: Expectation) -> Error | None:
    """The error that publishing to main gives; None when it is accepted."""
    try:
        repo.publish(draft, branch="main", expect=expect)
    except (CapacityExceeded, Unavailable) as error:
        return error
    return None


def test_a_disk_that_fills_up_while_chunks_are_written(small_disk: Path) -> None:
    big = draft_of(TOKENS, state_bytes=3 << 20)
    with Repository.create(small_disk) as repo:
        first = repo.publish(draft_of([1, 2, 3]), branch="main").manifest_id
        ballast = fill(small_disk, 4 << 20)
        with pytest.raises(CapacityExceeded) as caught:
            repo.publish(big, branch="big")
        assert caught.value.code == "capacity.disk"
        assert [ref.name for ref in repo.branches()] == ["main"]
        assert repo.catalog.counts().num_manifests == 1
        ballast.unlink()
        published = repo.publish(big, branch="big").manifest_id
        assert repo.resolve("main") == first
        assert_sound(repo)
        assert repo.tokens(published) == TOKENS


def test_a_disk_with_any_little_space_left(small_disk: Path) -> None:
    """The error may come from the store or the catalog, from any of their writes."""
    num_refused = 0
    with Repository.create(small_disk) as repo:
        repo.publish(draft_of([0, 0]), branch="main")
        for number, num_pages in enumerate([0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64]):
            draft = draft_of([number, *TOKENS])
            before = repo.resolve("main")
            ballast = fill(small_disk, num_pages * 4096)
            refusal = refusal_of(repo, draft, before)
            if refusal is not None:
                assert "space" in refusal.message or "disk" in refusal.message
                num_refused += 1
                ballast.unlink()
                assert repo.resolve("main") == before
                assert_sound(repo)
                repo.publish(draft, branch="main", expect=before)
            ballast.unlink(missing_ok=True)
            assert repo.tokens(repo.resolve("main")) == [number, *TOKENS]
            assert_sound(repo)
    assert 0 < num_refused < 14


def test_a_limit_on_the_size_of_files(memory_path: Path) -> None:
    with Repository.create(memory_path) as repo:
        repo.publish(draft_of([1, 2, 3]), branch="main")
    big = draft_of(TOKENS, state_bytes=3 << 20)

    def publish() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with Repository.open(memory_path) as repo:
            refusal = refusal_of(repo, big, "anything")
        assert refusal is not None
        assert refusal.code == "capacity.disk"

    assert in_child(publish) == 0
    with Repository.open(memory_path) as repo:
        assert_sound(repo)
        assert repo.catalog.counts().num_manifests == 1
        repo.publish(big, branch="main", expect="anything")
        assert_sound(repo)
