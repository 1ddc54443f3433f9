"""The command that compares two histories: ``diff``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forkpoint.cli.location import RepositoryPath, open_repository
from forkpoint.cli.output import AsJson, counted, in_decimal, indented, print_json, printable, shown_bytes
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.repo.diff import Diff, TextSplit
    from forkpoint.state.fingerprint import Difference

SIDE_CHARS: Final = 400


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(diff)


def diff(
    left: Annotated[str, typer.Argument(help="One of two to compare.")],
    right: Annotated[str, typer.Argument(help="The other one.")] = "HEAD",
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Show where two histories part.

    What each says after that, what they share, and how their fingerprint and sampling differ.

    JSON: left, right, common_ancestor, num_common_tokens, left_tokens, right_tokens, text (context, left, right), chunks,
    fingerprint, sampling (field, left, right).
    """
    with open_repository(repo) as repository:
        found = repository.diff(left, right)
    if as_json:
        print_json(_diff_record(found))
        return
    for line in _diff_lines(found, left, right):
        print(line)


def _diff_lines(found: Diff, left: str, right: str) -> Iterator[str]:
    yield f"left   {short(found.left)}  {left}"
    yield f"right  {short(found.right)}  {right}"
    ancestor = "none is known here" if found.common_ancestor is None else short(found.common_ancestor)
    yield f"common ancestor: {ancestor}"
    yield (
        f"{counted(found.num_common_tokens, 'token')} in common, then {len(found.left_tokens):,} on the left "
        f"and {len(found.right_tokens):,} on the right"
    )
    if found.text is not None and (found.left_tokens or found.right_tokens):
        yield from _split_lines(found.text)
    yield (
        f"chunks: {found.chunks_shared:,} shared ({shown_bytes(found.bytes_shared)}), {found.left_chunks:,} only left "
        f"({shown_bytes(found.left_bytes)}), {found.right_chunks:,} only right ({shown_bytes(found.right_bytes)})"
    )
    yield from _difference_lines("fingerprint", found.fingerprint)
    yield from _difference_lines("sampling", found.sampling)


def _split_lines(text: TextSplit) -> Iterator[str]:
    if text.context:
        yield indented(text.context, "    ")
    for side, sign in ((text.left, "  < "), (text.right, "  > ")):
        if side:
            more = f"... and {counted(len(side) - SIDE_CHARS, 'character')} more" if len(side) > SIDE_CHARS else ""
            yield indented(side[:SIDE_CHARS] + more, sign)


def _difference_lines(what: str, fields: Sequence[Difference]) -> Iterator[str]:
    if not fields:
        yield f"{what}: the same"
    for each in fields:
        yield f"{what}: {each.field}: {_value(each.have)} | {_value(each.want)}"


def _diff_record(found: Diff) -> dict[str, Any]:
    text = found.text
    return {
        "chunks": {
            "left": {"num_bytes": found.left_bytes, "num_chunks": found.left_chunks},
            "right": {"num_bytes": found.right_bytes, "num_chunks": found.right_chunks},
            "shared": {"num_bytes": found.bytes_shared, "num_chunks": found.chunks_shared},
        },
        "common_ancestor": found.common_ancestor,
        "fingerprint": [_difference_record(each) for each in found.fingerprint],
        "left": found.left,
        "left_tokens": list(found.left_tokens),
        "num_common_tokens": found.num_common_tokens,
        "right": found.right,
        "right_tokens": list(found.right_tokens),
        "sampling": [_difference_record(each) for each in found.sampling],
        "text": None if text is None else {"context": text.context, "left": text.left, "right": text.right},
    }


def _difference_record(each: Difference) -> dict[str, Any]:
    return {"field": each.field, "left": each.have, "right": each.want}


def _value(value: object) -> str:
    return printable(in_decimal(str(value)))
