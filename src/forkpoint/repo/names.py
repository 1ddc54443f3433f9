"""Names of refs, and the grammar of revisions (``main~2^1``, ``HEAD@{3}``). Pure: what a name points to is not known here.

Rules of names are those of ``git check-ref-format``, and one more: a name that reads as a complete object id is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from forkpoint.errors import InvalidInput
from forkpoint.ids import ManifestId, parse_object_id

HEAD: Final = "HEAD"
HEADS: Final = "refs/heads/"
TAGS: Final = "refs/tags/"
SYMBOLIC: Final = "ref:"
"""Written before a ref's name where a reflog value is a ref and not a manifest."""

MAX_NAME_BYTES: Final = 240
MAX_STEPS: Final = 1 << 20

Expectation = ManifestId | Literal["absent", "fast-forward", "anything"]
"""What a ref must hold for a move to go ahead: exactly this manifest, nothing, an ancestor (or nothing), or whatever it holds."""

_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]")
_OBJECT_ID: Final = re.compile(r"[0-9a-fA-F]{64}")
_STEP: Final = re.compile(r"([~^])(\d*)|@\{(\d+)\}")
_BASE: Final = re.compile(r"(?:(?!@\{)[^~^])*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One suffix of a revision: ``~N`` (first parents), ``^N`` (the N-th parent) or ``@{N}`` (the N-th last value)."""

    kind: Literal["~", "^", "@"]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A parsed revision: where it starts and the steps from there. ``base`` is empty for ``@{N}``."""

    base: str
    steps: tuple[Step, ...]


def branch_ref(name: str) -> str:
    """The full name of a branch, given short or full. Raises InvalidInput ``invalid_input.ref_name``."""
    return _full_name(name, HEADS)


def tag_ref(name: str) -> str:
    """The full name of a tag, given short or full. Raises InvalidInput ``invalid_input.ref_name``."""
    return _full_name(name, TAGS)


def short_name(ref: str) -> str:
    """What people are shown: a branch or tag without its folder."""
    return ref.removeprefix(HEADS).removeprefix(TAGS)


def candidates(base: str) -> tuple[str, ...]:
    """The refs that ``base`` may mean, in the order in which git tries them."""
    return (base, f"refs/{base}", TAGS + base, HEADS + base)


def check_ref_name(ref: str) -> None:
    """Refuse what git would refuse, and names that read as object ids.

    Raises:
        InvalidInput: ``invalid_input.ref_name`` saying which rule is broken.
    """
    found = _FORBIDDEN.search(ref)
    if found:
        _refuse(ref, f"it holds {found.group()!r}; leave out spaces, control characters and any of ~ ^ : ? * [ \\")
    if ref.startswith("/") or ref.endswith("/") or "//" in ref or not ref:
        _refuse(ref, "it has an empty part; write parts separated by single slashes")
    if ".." in ref or "@{" in ref or ref == "@":
        _refuse(ref, "'..', '@{' and a lone '@' have a meaning in revisions")
    parts = ref.split("/")
    if any(part.startswith(".") or part.endswith((".lock", ".")) for part in parts):
        _refuse(ref, "a part begins with '.', or ends with '.' or '.lock'")
    _check_text(ref)


def check_expectation(expect: Expectation) -> None:
    """Refuse what is neither a known word nor a complete id. Raises InvalidInput ``invalid_input.expect``."""
    if expect in ("absent", "fast-forward", "anything"):
        return
    try:
        parse_object_id(expect)
    except (InvalidInput, TypeError) as error:
        raise InvalidInput(
            f"{expect!r} is nothing that a ref can be expected to hold; write fast-forward, absent, anything or a complete id",
            code="expect", expect=repr(expect),
        ) from error  # fmt: skip


def parse_revision(text: str) -> Revision:
    """Split a revision into its base and steps.

    Raises:
        InvalidInput: ``invalid_input.revision`` for an empty text, an unknown suffix, or ``@{N}`` anywhere but after a ref.
    """
    matched = _BASE.match(text)
    base = matched.group() if matched else ""
    steps: list[Step] = []
    offset = len(base)
    while offset < len(text):
        step = _STEP.match(text, offset)
        if step is None or (step.group(3) is not None and steps):
            _refuse_revision(text, f"{text[offset:]!r} is not one of ~N, ^N, or @{{N}} directly after a ref")
        steps.append(_step(step, text))
        offset = step.end()
    if not base and not (steps and steps[0].kind == "@"):
        _refuse_revision(text, "it is empty")
    return Revision(base=HEAD if base == "@" else base, steps=tuple(steps))


def _step(found: re.Match[str], text: str) -> Step:
    sign, digits, value = found.groups()
    count = value if value is not None else digits or "1"
    if len(count) > 7 or int(count) > MAX_STEPS:
        _refuse_revision(text, f"{count} steps are more than {MAX_STEPS}")
    if value is not None:
        return Step(kind="@", count=int(value))
    return Step(kind="~" if sign == "~" else "^", count=int(count))


def _full_name(name: str, folder: str) -> str:
    short = name.removeprefix(folder)
    if short.startswith("refs/"):
        _refuse(name, f"it lies outside {folder}; write the name alone")
    if short.startswith("-") or short == HEAD:
        _refuse(name, "it begins with '-' or is HEAD, which commands would read otherwise")
    if _OBJECT_ID.fullmatch(short):
        _refuse(name, "it reads as an object id; choose a name that is not 64 hex digits")
    check_ref_name(short)
    check_ref_name(folder + short)
    return folder + short


def _check_text(ref: str) -> None:
    try:
        num_bytes = len(ref.encode())
    except UnicodeEncodeError:
        _refuse(ref, "it holds a lone surrogate")
    if num_bytes > MAX_NAME_BYTES:
        _refuse(ref, f"it has {num_bytes} bytes; use at most {MAX_NAME_BYTES}")


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidInput(f"{name!r} cannot name a ref: {why}", code="ref_name", name=repr(name), why=why)


def _refuse_revision(text: str, why: str) -> NoReturn:
    raise InvalidInput(
        f"{text!r} is not a revision: {why}; write a branch, a tag, HEAD or an id, then ~N, ^N or @{{N}}",
        code="revision", name=repr(text),
    )  # fmt: skip
