"""The command that looks at stored objects as they are: ``cat-file``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forkpoint.cli.location import RepositoryPath, open_repository
from forkpoint.cli.output import AsJson, print_json, printable
from forkpoint.errors import InvalidInput
from forkpoint.ids import Bytes, ObjectId, ObjectKind, short

if TYPE_CHECKING:
    from forkpoint.catalog.records import ObjectRef
    from forkpoint.repo.repository import Repository

HEAD_CHARS: Final = 400
_DIGITS: Final = re.compile(r"(?:b3:)?([0-9a-f]{4,64})")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("cat-file")(cat_file)


def cat_file(
    name: Annotated[str, typer.Argument(metavar="ID", help="An id of any object, its unique beginning, or a name.")],
    is_type: Annotated[bool, typer.Option("-t", help="Print its kind: manifest, chunk, move or tokenizer.")] = False,
    is_size: Annotated[bool, typer.Option("-s", help="Print its size in bytes.")] = False,
    is_print: Annotated[bool, typer.Option("-p", help="Print what it holds, which is the default.")] = False,
    repo: RepositoryPath = None,
    as_json: AsJson = False,
) -> None:
    """Show a stored object as it is.

    A manifest or move as JSON, a chunk by its slabs, a tokenizer by its beginning.

    JSON: object_id, kind, num_bytes, content.
    """
    if is_type + is_size + is_print > 1:
        raise InvalidInput("-t, -s and -p exclude each other; give one", code="usage")
    with open_repository(repo) as repository:
        each = _find_object(repository, name)
        num_bytes = repository.store.size(each.kind, each.object_id)
        content = None if is_type or is_size else _content(each.kind, repository.store.get(each.kind, each.object_id))
    if as_json:
        print_json({"content": content, "kind": str(each.kind), "num_bytes": num_bytes, "object_id": each.object_id})
    elif is_type:
        print(each.kind)
    elif is_size:
        print(num_bytes)
    else:
        _print_content(each.kind, content)


def _find_object(repository: Repository, name: str) -> ObjectRef:
    """A ref first, as everywhere; then objects of any kind by the beginning of their id; then revisions.

    Raises:
        NotFound: ``not_found.name``.
        InvalidInput: ``invalid_input.ambiguous``.
    """
    from forkpoint.catalog.records import ObjectRef
    from forkpoint.repo.resolution import find_ref

    digits = _DIGITS.fullmatch(name)
    if digits is not None and find_ref(repository.catalog, name, None) is None:
        found = list(_beginning_with(repository, digits.group(1)))
        if len(found) > 1:
            listed = ", ".join(f"{short(each.object_id)} ({each.kind})" for each in found[:10])
            raise InvalidInput(
                f"{name} is the beginning of several ids ({listed}); write more digits", code="ambiguous", name=name,
                num_candidates=len(found),
            )  # fmt: skip
        if found:
            return found[0]
    return ObjectRef(kind=ObjectKind.MANIFEST, object_id=repository.resolve(name))


def _beginning_with(repository: Repository, digits: str) -> Iterator[ObjectRef]:
    from forkpoint.catalog.records import ObjectRef

    store, beginning = repository.store, ObjectId("b3:" + digits)
    for kind in ObjectKind:
        if len(digits) == 64:
            ids = [beginning] if store.has(kind, beginning) else []
        else:
            ids = sorted(each for each in store.scan(kind) if each.startswith(beginning))
        yield from (ObjectRef(kind=kind, object_id=each) for each in ids)


def _content(kind: ObjectKind, data: Bytes) -> Any:
    """What an object holds, as JSON values; of a tokenizer, the beginning."""
    if kind is ObjectKind.CHUNK:
        return _chunk_record(data)
    text = bytes(data).decode("utf-8", errors="replace")
    return text[:HEAD_CHARS] if kind is ObjectKind.TOKENIZER else json.loads(text)


def _chunk_record(data: Bytes) -> dict[str, Any]:
    from forkpoint.state.chunk import parse_chunk

    chunk = parse_chunk(data)
    return {
        "domain": [{"axis": axis, "start": start, "stop": stop} for axis, start, stop in chunk.domain],
        "slabs": [
            {
                "axes": list(each.axes),
                "dtype": each.dtype,
                "name": each.name,
                "num_bytes": each.num_bytes,
                "shape": list(each.shape),
            }
            for each in chunk.specs.values()
        ],
    }


def _print_content(kind: ObjectKind, content: Any) -> None:
    if kind is ObjectKind.TOKENIZER:
        print("\n".join(printable(line) for line in content.split("\n")))
    elif kind is ObjectKind.CHUNK:
        for each in content["domain"]:
            print(f"{each['axis']} [{each['start']}, {each['stop']})")
        for each in content["slabs"]:
            shape = " ".join(f"{axis}={size}" for axis, size in zip(each["axes"], each["shape"], strict=True))
            print(f"{each['name']:16s} {each['dtype']:8s} {each['num_bytes']:>14,} B  {shape}")
    else:
        print(json.dumps(content, indent=2, ensure_ascii=False))
