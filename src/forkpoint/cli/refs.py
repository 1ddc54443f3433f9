"""Commands about names: ``branch``, ``tag``, ``fork``, ``checkout``, ``reflog``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from forkpoint.cli.location import RepositoryPath, open_repository
from forkpoint.cli.output import AsJson, counted, print_json, printable, shown_bytes, shown_time
from forkpoint.errors import Conflict, InvalidInput
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.repo.reflog import ReflogEntry
    from forkpoint.repo.refs import Ref
    from forkpoint.repo.repository import Repository
    from forkpoint.repo.verification import VerificationReceipt

Force: TypeAlias = Annotated[bool, typer.Option("--force", "-f", help="Move it, wherever it is now.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(branch)
    app.command()(tag)
    app.command()(fork)
    app.command()(checkout)
    app.command()(reflog)


def branch(
    name: Annotated[str | None, typer.Argument(help="Branch to make; without it, branches are listed.")] = None,
    start: Annotated[str, typer.Argument(help="What it points at.")] = "HEAD",
    is_list: Annotated[bool, typer.Option("--list", "-l", help="List branches, as without any argument.")] = False,
    delete: Annotated[str | None, typer.Option("--delete", "-d", metavar="NAME", help="Delete a branch.")] = None,
    rename: Annotated[
        tuple[str, str] | None, typer.Option("--move", "-m", metavar="OLD NEW", help="Rename a branch.")
    ] = None,
    force: Force = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """List, make, move, rename or delete branches.

    JSON: branches (name, manifest_id, is_current) of a list; name and manifest_id of the one made; deleted; old and new.
    """
    _check_one_of(("NAME", name), ("--list", is_list or None), ("--delete", delete), ("--move", rename))
    _check_force(force, name)
    with open_repository(repo) as repository:
        if delete is not None:
            repository.delete_branch(delete)
            _say({"deleted": delete}, f"Deleted branch {delete}; it was at {delete}@{{1}}", as_json)
        elif rename is not None:
            repository.rename_branch(*rename)
            _say({"new": rename[1], "old": rename[0]}, f"Renamed branch {rename[0]} to {rename[1]}", as_json)
        elif name is not None:
            repository.branch(name, start, expect=_expectation(force))
            _say_ref(_find(repository.branches(), name), "Branch", as_json)
        else:
            _list_branches(repository, as_json)


def tag(
    name: Annotated[str | None, typer.Argument(help="Tag to make; without it, tags are listed.")] = None,
    target: Annotated[str, typer.Argument(help="What it names.")] = "HEAD",
    delete: Annotated[str | None, typer.Option("--delete", "-d", metavar="NAME", help="Delete a tag.")] = None,
    force: Force = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """List, make or delete tags. JSON: tags (name, manifest_id) of a list; name and manifest_id of the one made; deleted."""
    _check_one_of(("NAME", name), ("--delete", delete))
    _check_force(force, name)
    with open_repository(repo) as repository:
        if delete is not None:
            repository.delete_tag(delete)
            _say({"deleted": delete}, f"Deleted tag {delete}", as_json)
        elif name is not None:
            repository.tag(name, target, expect=_expectation(force))
            _say_ref(_find(repository.tags(), name), "Tag", as_json)
        elif as_json:
            print_json({"tags": [_ref_record(each) for each in repository.tags()]})
        else:
            for each in repository.tags():
                print(f"{short(each.manifest_id)}  {each.name}")


def fork(
    name: Annotated[str, typer.Argument(help="What to fork: a branch, a tag, an id, main~1.")],
    new: Annotated[list[str] | None, typer.Argument(help="Names of the new branches.")] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, max=10_000, help="Make so many, numbered: NAME-1, NAME-2.")
    ] = None,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Make new branches at one state; copies no bytes.

    Without NEW the branches are numbered after NAME; with --count and one NEW, after NEW.
    JSON: manifest_id, branches (names), bytes_copied, position, num_bytes.
    """
    with open_repository(repo) as repository:
        manifest_id = repository.resolve(name)
        names = _fork_names(repository, name, new or [], count)
        for each in names:
            repository.branch(each, manifest_id, message=f"fork: from {name}")
        row = repository.row(manifest_id)
    if as_json:
        print_json(
            {
                "branches": names,
                "bytes_copied": 0,
                "manifest_id": manifest_id,
                "num_bytes": row.num_bytes,
                "position": row.position,
            }
        )
        return
    for each in names:
        print(each)
    where = "" if row.position is None else f" (position {row.position:,})"
    print(
        f"{counted(len(names), 'branch')} at {short(manifest_id)}{where}: "
        f"{shown_bytes(row.num_bytes)} shared, 0 bytes copied"
    )


def checkout(
    name: Annotated[str, typer.Argument(help="A branch, or anything that names a manifest: then HEAD is detached.")],
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Verify what a name leads to, and move HEAD there.

    Every chunk must be present and sound. Prints a receipt.

    JSON: head (branch, manifest_id), receipt (manifest_id, tokens, chunks_verified, bytes_verified, elapsed_us).
    """
    with open_repository(repo) as repository:
        receipt = repository.verify(name)
        head = repository.checkout(name)
    if as_json:
        print_json(
            {
                "head": {"branch": head.branch, "manifest_id": head.manifest_id},
                "receipt": receipt_record(receipt),
            }
        )
        return
    print(
        f"On branch {head.branch}" if head.branch is not None else f"HEAD is detached at {short(receipt.manifest_id)}"
    )
    print(receipt_line(receipt))


def reflog(
    ref: Annotated[str, typer.Argument(help="A branch, a tag or HEAD; also a deleted one.")] = "HEAD",
    count: Annotated[int | None, typer.Option("--max-count", "-n", min=0, help="Print so many at most.")] = None,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Show what a ref was before, newest first.

    JSON: ref, entries (index, manifest_id, ref, old, new, at_us, tx, who, message, is_trusted).
    """
    with open_repository(repo) as repository:
        entries = repository.reflog(ref, limit=count)
    if as_json:
        print_json({"entries": [_move_record(index, each) for index, each in enumerate(entries)], "ref": ref})
        return
    for index, each in enumerate(entries):
        value = "deleted     " if each.manifest_id is None else short(each.manifest_id)
        what = printable(each.move.message.partition("\n")[0])
        print(f"{value}  {ref}@{{{index}}}  {shown_time(each.move.at_us)}  {printable(each.move.who)}  {what}")


def receipt_record(receipt: VerificationReceipt) -> dict[str, Any]:
    """What was verified, for JSON."""
    return {
        "bytes_verified": receipt.num_bytes,
        "chunks_verified": receipt.num_chunks,
        "elapsed_us": round(receipt.elapsed_ms * 1000),
        "manifest_id": receipt.manifest_id,
        "tokens": receipt.num_tokens,
    }


def receipt_line(receipt: VerificationReceipt) -> str:
    """What was verified, for people."""
    return (
        f"{short(receipt.manifest_id)}: {counted(receipt.num_tokens, 'token')}, {counted(receipt.num_chunks, 'chunk')} "
        f"verified by digest, {shown_bytes(receipt.num_bytes)} in {receipt.elapsed_ms:.1f} ms"
    )


def _list_branches(repository: Repository, as_json: bool) -> None:
    current = repository.head().branch
    branches = repository.branches()
    if as_json:
        print_json({"branches": [_ref_record(each) | {"is_current": each.name == current} for each in branches]})
        return
    for each in branches:
        print(f"{'*' if each.name == current else ' '} {short(each.manifest_id)}  {each.name}")


def _fork_names(repository: Repository, name: str, new: Sequence[str], count: int | None) -> list[str]:
    """The branches to make, none of which exists. Checked before any is made, so that a refusal leaves nothing behind."""
    from forkpoint.repo.names import branch_ref, short_name

    if count is not None and len(new) > 1:
        raise InvalidInput("give --count with one NEW at most; or name every branch", code="usage")
    taken = {each.name for each in repository.branches()}
    if new and count is None:
        names = [short_name(branch_ref(each)) for each in new]
        again = next((each for each in names if each in taken or names.count(each) > 1), None)
        if again is not None:
            raise Conflict(f"branch {again} exists already; choose another name", code="ref", ref=branch_ref(again))
        return names
    stem = new[0] if new else name if name in taken else "fork"
    branch_ref(stem)
    return _numbered(stem, count or 1, taken)


def _numbered(stem: str, count: int, taken: set[str]) -> list[str]:
    """The first ``count`` free names of ``stem-1``, ``stem-2`` and so on."""
    names: list[str] = []
    number = 0
    while len(names) < count:
        number += 1
        if f"{stem}-{number}" not in taken:
            names.append(f"{stem}-{number}")
    return names


def _check_one_of(*given: tuple[str, object]) -> None:
    names = [name for name, value in given if value is not None]
    if len(names) > 1:
        raise InvalidInput(f"{' and '.join(names)} exclude each other; give one", code="usage")


def _check_force(force: bool, name: str | None) -> None:
    if force and name is None:
        raise InvalidInput("--force is about a NAME to be moved; give one", code="usage")


def _expectation(force: bool) -> Literal["anything", "absent"]:
    return "anything" if force else "absent"


def _find(refs: Sequence[Ref], name: str) -> Ref:
    return next(each for each in refs if name in (each.name, each.ref))


def _say(record: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print(text)


def _say_ref(ref: Ref, what: str, as_json: bool) -> None:
    _say(_ref_record(ref), f"{what} {ref.name} is at {short(ref.manifest_id)}", as_json)


def _ref_record(ref: Ref) -> dict[str, Any]:
    return {"manifest_id": ref.manifest_id, "name": ref.name}


def _move_record(index: int, entry: ReflogEntry) -> dict[str, Any]:
    move = entry.move
    return {
        "at_us": move.at_us,
        "index": index,
        "is_trusted": move.is_trusted,
        "manifest_id": entry.manifest_id,
        "message": move.message,
        "new": move.new,
        "old": move.old,
        "ref": move.ref,
        "tx": move.tx,
        "who": move.who,
    }
