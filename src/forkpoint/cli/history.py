"""Commands that look at what was committed: ``log``, ``show``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forkpoint.cli.location import RepositoryPath, open_repository
from forkpoint.cli.output import (
    AsJson,
    counted,
    in_decimal,
    indented,
    print_json,
    print_lines,
    printable,
    shown_bytes,
    shown_time,
)
from forkpoint.errors import InvalidInput
from forkpoint.ids import short

if TYPE_CHECKING:
    from forkpoint.repo.history import LogEntry, Shown
    from forkpoint.state.manifest import Group

TEXT_END_CHARS: Final = 300

AsOf = Annotated[int | None, typer.Option("--as-of", metavar="TX", help="As it was at this transaction.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(log)
    app.command()(show)


def log(
    name: Annotated[str | None, typer.Argument(help="Where to begin; default: HEAD.")] = None,
    is_all: Annotated[bool, typer.Option("--all", help="Begin at every branch, every tag and HEAD.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Draw lines of descent beside the text.")] = False,
    oneline: Annotated[bool, typer.Option("--oneline", help="One line each.")] = False,
    count: Annotated[int | None, typer.Option("--max-count", "-n", min=0, help="Print so many at most.")] = None,
    as_of: AsOf = None,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Show manifests and what they descend from, newest first.

    JSON: entries (manifest_id, kind, position, num_bytes, message, who, added_us, added_tx, parents, refs).
    """
    if is_all and name is not None:
        raise InvalidInput("--all begins everywhere; leave out NAME", code="usage")
    with open_repository(repo) as repository:
        found = (
            repository.log_all(limit=count, as_of=as_of)
            if is_all
            else repository.log(name or "HEAD", limit=count, as_of=as_of)
        )
        current = repository.head(as_of).branch
    if as_json:
        print_json({"entries": [_entry_record(each) for each in found]})
        return
    lines = _oneline if oneline else _paragraph
    texts = ((each, lines(each, _decoration(each.refs, current))) for each in found)
    print_lines(_beside_graph(found, texts) if graph else map(_joined, texts))


def show(
    name: Annotated[str, typer.Argument(help="A branch, a tag, HEAD, an id, main~1, main@{2}.")] = "HEAD",
    as_of: AsOf = None,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Show one manifest.

    Where it stands, what it fits, what it is made of, and how its text ends.

    JSON: manifest_id, kind, refs, boundary, fingerprint (state_id, execution_id, state, execution), groups, parents, payload,
    message, num_bytes, is_trusted, pending_text, tokens, text.
    """
    with open_repository(repo) as repository:
        shown = repository.show(name, as_of=as_of)
        decode = repository.tokenizer(shown.manifest_id)
        pending = None if decode is None or shown.row.pending is None else decode([shown.row.pending])
        current = repository.head(as_of).branch
    if as_json:
        print_json(_shown_record(shown, pending))
        return
    for line in _shown_lines(shown, pending, current):
        print(line)


# ---- log ----


def _oneline(entry: LogEntry, decoration: str) -> list[str]:
    row = entry.row
    message = printable(row.message.partition("\n")[0])
    return [f"{short(row.manifest_id)}{decoration} {'' if row.position is None else row.position} {message}".rstrip()]


def _paragraph(entry: LogEntry, decoration: str) -> list[str]:
    row = entry.row
    where = shown_bytes(row.num_bytes) if row.position is None else f"{row.position}, {shown_bytes(row.num_bytes)}"
    lines = [f"{row.kind} {short(row.manifest_id)}{decoration}"]
    if row.parents:
        lines.append("Parents:  " + ", ".join(_parent(edge.role, edge.manifest_id) for edge in row.parents))
    lines.append(f"Position: {where}")
    lines.append(f"Who:      {printable(entry.who or 'unknown')}")
    lines.append(f"Date:     {shown_time(row.added_us)}")
    if row.message:
        lines += ["", *indented(row.message.rstrip()).split("\n")]
    return [*lines, ""]


def _decoration(refs: Sequence[str], current: str | None) -> str:
    """The refs at a manifest as git writes them: `` (HEAD -> main, tag: v1, side)``."""
    if not refs:
        return ""
    is_attached = "HEAD" in refs and current is not None
    names = [f"HEAD -> {current}"] if is_attached else []
    for ref in refs:
        if is_attached and ref in ("HEAD", f"refs/heads/{current}"):
            continue
        tag = ref.removeprefix("refs/tags/")
        names.append(ref.removeprefix("refs/heads/") if tag == ref else f"tag: {tag}")
    return f" ({', '.join(names)})"


def _parent(role: str, manifest_id: str) -> str:
    return manifest_id[3:15] if role == "continues" else f"{manifest_id[3:15]} ({role})"


def _joined(item: tuple[LogEntry, list[str]]) -> str:
    return "\n".join(item[1])


def _beside_graph(entries: Sequence[LogEntry], texts: Iterator[tuple[LogEntry, list[str]]]) -> Iterator[str]:
    from forkpoint.cli.graph import Graph

    graph = Graph({each.row.manifest_id for each in entries})
    for entry, (first, *others) in texts:
        parents = [edge.manifest_id for edge in entry.row.parents]
        yield f"{graph.node(entry.row.manifest_id)}{first}"
        yield from graph.edges(entry.row.manifest_id, parents)
        for line in others:
            yield f"{graph.margin()}{line}".rstrip()


def _entry_record(entry: LogEntry) -> dict[str, Any]:
    row = entry.row
    return {
        "added_tx": row.added_tx,
        "added_us": row.added_us,
        "kind": row.kind,
        "manifest_id": row.manifest_id,
        "message": row.message,
        "num_bytes": row.num_bytes,
        "parents": [{"manifest_id": edge.manifest_id, "role": edge.role} for edge in row.parents],
        "position": row.position,
        "refs": list(entry.refs),
        "who": entry.who,
    }


# ---- show ----


def _shown_lines(shown: Shown, pending: str | None, current: str | None) -> Iterator[str]:
    manifest, row, fingerprint = shown.manifest, shown.row, shown.manifest.fingerprint
    yield f"{manifest.kind} {shown.manifest_id}{_decoration(shown.refs, current)}"
    yield from _boundary_lines(manifest.boundary, pending)
    yield f"Trusted:   {'yes: computed or verified here' if row.is_trusted else 'no: it came from outside, and is used by name only'}"
    yield f"State:     {short(fingerprint.state_id)}{_highlights(fingerprint.state)}"
    yield f"Execution: {short(fingerprint.execution_id)}{_highlights(fingerprint.execution)}"
    for parent in manifest.parents:
        yield f"Parent:    {_parent(parent.role, parent.manifest_id)}"
    yield f"Chunks:    {len(set(manifest.chunks())):,} of {shown_bytes(manifest.num_bytes)}"
    for group in manifest.groups:
        yield f"    {group.name} ({group.kind}): {counted(len(group.chunks), 'chunk')}, {shown_bytes(_group_bytes(group))}"
    if row.message:
        yield from ("", indented(row.message))
    if shown.text is not None:
        cut = len(shown.text) > TEXT_END_CHARS
        yield from ("", indented(("..." if cut else "") + shown.text[-TEXT_END_CHARS:], "  | "))


def _boundary_lines(boundary: Mapping[str, Any], pending: str | None) -> Iterator[str]:
    if isinstance(boundary.get("position"), int):
        waits = boundary.get("pending")
        text = "" if pending is None else f" {pending!r}"
        yield f"Position:  {boundary['position']:,}" + (
            ", no token pending" if waits is None else f", pending token {waits}{text}"
        )
    if isinstance(boundary.get("prompt_length"), int):
        yield f"Prompt:    {counted(boundary['prompt_length'], 'token')}; what follows was generated"
    sampling = boundary.get("sampling")
    if isinstance(sampling, Mapping) and sampling:
        yield f"Sampling:  {', '.join(f'{key} {_plain(value)}' for key, value in sampling.items())}"


def _highlights(record: Mapping[str, Any]) -> str:
    """The short plain values of a record; what is nested, long or a digest is in the JSON."""
    plain = {
        key: value for key, value in record.items() if isinstance(value, str | int) and not isinstance(value, bool)
    }
    short_ones = [
        f"{key} {value}" for key, value in plain.items() if not str(value).startswith("b3:") and len(str(value)) <= 40
    ]
    return f" ({printable(', '.join(short_ones))})" if short_ones else ""


def _plain(value: Any) -> str:
    """A value of a canonical record, floats as numbers."""
    from forkpoint.errors import Corrupt
    from forkpoint.state.canonical import to_float

    try:
        return repr(to_float(value))
    except Corrupt:
        return printable(in_decimal(str(value)))


def _group_bytes(group: Group) -> int:
    return sum(chunk.num_bytes for chunk in group.chunks)


def _shown_record(shown: Shown, pending: str | None) -> dict[str, Any]:
    manifest, fingerprint = shown.manifest, shown.manifest.fingerprint
    return {
        "boundary": manifest.boundary,
        "fingerprint": {
            "execution": fingerprint.execution,
            "execution_id": fingerprint.execution_id,
            "state": fingerprint.state,
            "state_id": fingerprint.state_id,
        },
        "groups": [
            {"kind": each.kind, "name": each.name, "num_bytes": _group_bytes(each), "num_chunks": len(each.chunks)}
            for each in manifest.groups
        ],
        "is_trusted": shown.row.is_trusted,
        "kind": manifest.kind,
        "manifest_id": shown.manifest_id,
        "message": shown.row.message,
        "num_bytes": manifest.num_bytes,
        "parents": [{"manifest_id": each.manifest_id, "role": each.role} for each in manifest.parents],
        "payload": manifest.payload,
        "pending_text": pending,
        "refs": list(shown.refs),
        "text": shown.text,
        "tokens": None if shown.tokens is None else list(shown.tokens),
    }
