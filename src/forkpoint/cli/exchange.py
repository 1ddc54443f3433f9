"""Commands that carry a continuation in and out as a file: ``commit``, ``snapshot``."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from forkpoint.cli.location import RepositoryPath, open_repository
from forkpoint.cli.output import AsJson, counted, print_json, shown_bytes
from forkpoint.cli.text import checked_text
from forkpoint.errors import CapacityExceeded, InvalidInput, NotFound, Unavailable
from forkpoint.ids import Bytes, short

if TYPE_CHECKING:
    from forkpoint.repo.repository import Repository

_STREAM: Final = "-"
"""Stands for standard input and output."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(commit)
    app.command()(snapshot)


def commit(
    file: Annotated[str, typer.Argument(help="What snapshot() or forkpoint snapshot wrote; - is standard input.")],
    branch: Annotated[
        str | None, typer.Option("--branch", "-b", help="Branch to move to it; default: the current one.")
    ] = None,
    message: Annotated[
        str, typer.Option("--message", "-m", callback=checked_text, help="For the log and the reflog.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", "-f", help="Move the branch, wherever it is now.")] = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Commit a snapshot file.

    It is verified and can be used by name, but is not trusted: its prefixes are not indexed.

    JSON: manifest_id, branch, was_new, chunks_written, bytes_written, chunks_shared, bytes_shared, elapsed_us.
    """
    with open_repository(repo) as repository:
        target = branch or _current_branch(repository)
        expect: Literal["anything", "fast-forward"] = "anything" if force else "fast-forward"
        done = repository.commit_bundle(_read(file), branch=target, expect=expect, message=message)
    if as_json:
        print_json(
            {
                "branch": target,
                "bytes_shared": done.bytes_shared,
                "bytes_written": done.bytes_written,
                "chunks_shared": done.chunks_shared,
                "chunks_written": done.chunks_written,
                "elapsed_us": round(done.elapsed_ms * 1000),
                "manifest_id": done.manifest_id,
                "was_new": done.was_new,
            }
        )
        return
    print(
        f"{target} is at {short(done.manifest_id)}: {counted(done.chunks_written, 'chunk')} written "
        f"({shown_bytes(done.bytes_written)}), {done.chunks_shared:,} shared ({shown_bytes(done.bytes_shared)})"
    )


def snapshot(
    name: Annotated[str, typer.Argument(help="What to write: a branch, a tag, HEAD, an id.")],
    file: Annotated[str, typer.Argument(help="Where to; - is standard output.")],
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Write a continuation to one file.

    With its chunks and tokenizer, without ancestors. JSON: manifest_id, file, num_bytes."""
    if file == _STREAM and as_json:
        raise InvalidInput("the snapshot itself goes to standard output; give a file with --json", code="usage")
    with open_repository(repo) as repository:
        manifest_id = repository.resolve(name)
        parts = repository.export_bundle(manifest_id)
        if file == _STREAM:
            for part in parts:
                sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
            return
        num_bytes = _write(Path(file), parts)
    if as_json:
        print_json({"file": file, "manifest_id": manifest_id, "num_bytes": num_bytes})
    else:
        print(f"{short(manifest_id)} is in {file}, {shown_bytes(num_bytes)}")


def _current_branch(repository: Repository) -> str:
    branch = repository.head().branch
    if branch is None:
        raise InvalidInput("HEAD is detached, so there is no current branch; give --branch", code="branch")
    return branch


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == _STREAM else Path(file).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"there is no file {file}", code="file", path=file) from None
    except OSError as error:
        raise Unavailable(f"cannot read {file}: {error.strerror}", code="file", path=file) from error


def _write(path: Path, parts: Iterator[Bytes]) -> int:
    """Write a file whole or not at all, or a device as it comes; returns the number of bytes."""
    try:
        if path.exists() and not path.is_file():
            with path.open("wb", buffering=0) as device:
                return sum(device.write(part) for part in parts)
        return _write_whole(path, parts)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CapacityExceeded(f"no space is left for {path}; free some", code="disk", path=str(path)) from error
        raise Unavailable(f"cannot write {path}: {error.strerror}", code="file", path=str(path)) from error


def _write_whole(path: Path, parts: Iterator[Bytes]) -> int:
    draft = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        with draft.open("xb") as out:
            num_bytes = sum(out.write(part) for part in parts)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    return num_bytes
