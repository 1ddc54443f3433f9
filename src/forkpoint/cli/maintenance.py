"""Commands that keep a repository well: ``gc``, ``fsck``, ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forkpoint.cli.location import RepositoryPath, find_repository, open_repository
from forkpoint.cli.output import AsJson, counted, print_json, printable, progress_bar, shown_bytes
from forkpoint.cli.refs import receipt_line, receipt_record
from forkpoint.errors import EXIT_CODES, Corrupt
from forkpoint.ids import ObjectKind

if TYPE_CHECKING:
    from forkpoint.catalog.records import Counts
    from forkpoint.repo.fsck import Finding
    from forkpoint.repo.gc import Collection, CollectionPlan
    from forkpoint.repo.rebuild import RebuildReport
    from forkpoint.repo.repository import Repository


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(gc)
    app.command()(fsck)
    app.command()(verify)


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and keep it.")] = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Delete what nothing leads to.

    Kept is what a ref, a move of the last 90 days or a lease leads to, with all it descends from.

    JSON: is_dry_run, doomed (objects), deleted (objects by kind), bytes_freed, kept (manifests, chunks, bytes), elapsed_us.
    With --dry-run, deleted and bytes_freed are what would go, and kept is all that is live now.
    """
    with open_repository(repo) as repository:
        if dry_run:
            record = _plan_record(repository.plan_collection(), repository.catalog.counts())
        else:
            record = _collection_record(repository.collect(), repository.catalog.counts())
    if as_json:
        print_json(record)
        return
    kept, deleted = record["kept"], record["deleted"]
    gone = ", ".join(counted(count, kind) for kind, count in deleted.items() if count) or "nothing"
    print(f"{'Would delete' if dry_run else 'Deleted'}: {gone}; {shown_bytes(record['bytes_freed'])}")
    print(
        f"{'Live now' if dry_run else 'Kept'}: {counted(kept['manifests'], 'manifest')}, "
        f"{counted(kept['chunks'], 'chunk')} of {shown_bytes(kept['bytes'])}"
    )


def fsck(
    repair: Annotated[
        bool, typer.Option("--repair", help="Set damage aside and move refs back to what is sound.")
    ] = False,
    rebuild_catalog: Annotated[
        bool,
        typer.Option("--rebuild-catalog", help="First make the catalog anew from the store; nobody may have it open."),
    ] = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Verify every object, every manifest and the catalog. Exits with 6 when errors remain.

    JSON: findings (code, severity, subject, message, remedy, objects), num_errors, repaired (what was done), rebuilt.
    """
    from forkpoint.repo.repository import Repository

    rebuilt = Repository.rebuild_catalog(repo or find_repository(None)) if rebuild_catalog else None
    repaired: list[str] = []
    with open_repository(repo) as repository:
        findings = _checked(repository)
        if repair and findings:
            repaired = repository.repair(findings)
            findings = _checked(repository)
    num_errors = sum(each.severity == "error" for each in findings)
    if as_json:
        print_json(
            {
                "findings": [_finding_record(each) for each in findings],
                "num_errors": num_errors,
                "rebuilt": None if rebuilt is None else _rebuild_record(rebuilt),
                "repaired": repaired,
            }
        )
    else:
        _show_check(findings, repaired, rebuilt, num_errors)
    if num_errors:
        raise typer.Exit(EXIT_CODES[Corrupt.family])


def verify(
    name: Annotated[str, typer.Argument(help="A branch, a tag, HEAD, an id.")] = "HEAD",
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the digests of a manifest and its chunks.

    Prints a receipt, and changes nothing.

    JSON: manifest_id, tokens, chunks_verified, bytes_verified, elapsed_us.
    """
    with open_repository(repo) as repository:
        receipt = repository.verify(name)
    if as_json:
        print_json(receipt_record(receipt))
    else:
        print(receipt_line(receipt))


def _checked(repository: Repository) -> list[Finding]:
    with progress_bar("verifying", "objects") as progress:
        return repository.check(progress)


def _plan_record(plan: CollectionPlan, counts: Counts) -> dict[str, Any]:
    return {
        "bytes_freed": plan.num_bytes,
        "deleted": {str(kind): plan.count(kind) for kind in ObjectKind},
        "doomed": len(plan.objects),
        "elapsed_us": 0,
        "is_dry_run": True,
        "kept": _kept_record(counts),
    }


def _collection_record(done: Collection, counts: Counts) -> dict[str, Any]:
    return {
        "bytes_freed": done.bytes_deleted,
        "deleted": {str(kind): done.deleted[kind] for kind in ObjectKind},
        "doomed": done.num_doomed,
        "elapsed_us": round(done.elapsed_ms * 1000),
        "is_dry_run": False,
        "kept": _kept_record(counts),
    }


def _kept_record(counts: Counts) -> dict[str, int]:
    return {"bytes": counts.chunk_bytes, "chunks": counts.num_chunks, "manifests": counts.num_manifests}


def _show_check(
    findings: Sequence[Finding], repaired: Sequence[str], rebuilt: RebuildReport | None, num_errors: int
) -> None:
    if rebuilt is not None:
        print(
            f"Rebuilt the catalog: {counted(rebuilt.num_manifests, 'manifest')}, {counted(rebuilt.num_refs, 'ref')}, "
            f"{counted(rebuilt.num_moves, 'move')}"
        )
        for problem in rebuilt.problems:
            print(f"  {printable(problem)}")
    for line in repaired:
        print(f"repaired: {line}")
    for each in findings:
        print(f"{each.severity}: {each.subject}: {each.message} [{each.code}]")
        print(f"    {each.remedy}")
    print(
        f"{counted(num_errors, 'error')}, {counted(len(findings) - num_errors, 'other finding')}"
        if findings
        else "All is well."
    )


def _finding_record(each: Finding) -> dict[str, Any]:
    return {
        "code": each.code,
        "message": each.message,
        "objects": [{"kind": str(item.kind), "object_id": item.object_id} for item in each.objects],
        "remedy": each.remedy,
        "severity": each.severity,
        "subject": each.subject,
    }


def _rebuild_record(report: RebuildReport) -> dict[str, Any]:
    return {
        "manifests": report.num_manifests,
        "moves": report.num_moves,
        "problems": list(report.problems),
        "refs": report.num_refs,
        "trusted": report.num_trusted,
    }
