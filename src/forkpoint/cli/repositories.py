"""Commands about a repository as a whole: ``init``, ``status``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forkpoint.cli.location import RepositoryPath, check_path, open_repository
from forkpoint.cli.output import AsJson, counted, print_json, printable, shown_bytes
from forkpoint.errors import Corrupt, Incompatible, NotFound
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.repo.history import Status
    from forkpoint.repo.repository import Repository


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(init)
    app.command()(status)


def init(
    path: Annotated[Path, typer.Argument(help="Folder to make it in; it is made too when absent.")] = Path(),
    namespace: Annotated[str, typer.Option(help="What its prefix index keeps apart from others.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Make an empty repository. JSON: folder, namespace, branch."""
    from forkpoint.repo.repository import Repository

    check_path(path)
    with Repository.create(path, namespace=namespace) as repository:
        branch = repository.head().branch
        if as_json:
            print_json({"branch": branch, "folder": str(repository.folder), "namespace": repository.namespace})
        else:
            print(f"Empty repository in {repository.folder}, on branch {branch}")


def status(repo: RepositoryPath = None, as_json: AsJson = False) -> None:
    """Show where HEAD is and how much there is. JSON: folder, namespace, head, counts.

    head has branch, manifest_id, position, pending, pending_text, message; counts are live facts, with bytes in chunk_bytes.
    """
    with open_repository(repo) as repository:
        found = repository.status()
        pending = _pending_text(repository, found)
        if as_json:
            print_json(_status_record(repository, found, pending))
            return
    _show_head(found, pending)
    counts = found.counts
    print(f"{counted(found.num_branches, 'branch')}, {counted(found.num_tags, 'tag')}")
    print(
        f"{counted(counts.num_manifests, 'manifest')}, {counted(counts.num_chunks, 'chunk')} of {shown_bytes(counts.chunk_bytes)}, "
        f"{counts.num_prefixes:,} in the prefix index"
    )
    print(
        f"{counted(found.num_leases, 'lease')}; {counted(counts.num_pending_deletions, 'object')} doomed, not deleted yet"
    )


def _show_head(found: Status, pending: str | None) -> None:
    head, row = found.head, found.row
    print(f"On branch {head.branch}" if head.branch is not None else "HEAD is detached")
    if head.manifest_id is None or row is None:
        print("Nothing is committed yet: forkpoint run MODEL -p TEXT -b NAME, or forkpoint commit FILE")
        return
    where = "" if row.position is None else f" at position {row.position:,}"
    waits = "" if row.pending is None else f", pending token {row.pending}"
    shown = "" if pending is None else f" {pending!r}"
    print(f"{short(head.manifest_id)}{where}{waits}{shown}")
    if row.message:
        print(f"    {printable(row.message.splitlines()[0])}")


def _pending_text(repository: Repository, found: Status) -> str | None:
    """The pending token as text. None also when a part is damaged: status goes on to serve, and fsck says what is wrong."""
    if found.row is None or found.row.pending is None:
        return None
    try:
        decode = repository.tokenizer(found.row.manifest_id)
    except (NotFound, Corrupt, Incompatible):
        return None
    return None if decode is None else decode([found.row.pending])


def _status_record(repository: Repository, found: Status, pending: str | None) -> dict[str, Any]:
    counts, row = found.counts, found.row
    return {
        "counts": {
            "branches": found.num_branches,
            "chunk_bytes": counts.chunk_bytes,
            "chunks": counts.num_chunks,
            "leases": found.num_leases,
            "manifests": counts.num_manifests,
            "moves": counts.num_moves,
            "pending_deletions": counts.num_pending_deletions,
            "prefixes": counts.num_prefixes,
            "tags": found.num_tags,
            "transactions": counts.num_transactions,
        },
        "folder": str(repository.folder),
        "head": {
            "branch": found.head.branch,
            "manifest_id": found.head.manifest_id,
            "message": None if row is None else row.message,
            "pending": None if row is None else row.pending,
            "pending_text": pending,
            "position": None if row is None else row.position,
        },
        "namespace": repository.namespace,
    }
