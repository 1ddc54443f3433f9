"""What the documents say is there: their programs run, and every command, file, test, function and error code they name exists."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from forkpoint.cli.main import make_app

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "src" / "forkpoint"
NAMES: Final = ("README.md", "ARCHITECTURE.md", "FOR-GIT-USERS.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS: Final = [*NAMES, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/design").glob("*.md")))]

_FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK: Final = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PRINTED: Final = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
_COMMAND: Final = re.compile(r"^forkpoint [a-z-]+")
_PATH: Final = re.compile(r"[\w.-]*/[\w./-]*|\w[\w-]*\.(?:md|py|toml|txt|svg)")
_CODE: Final = re.compile(r"(not_found|conflict|incompatible|corrupt|invalid_input|capacity|unavailable)\.(\w+)")
_NOT_HERE: Final = ("refs/", ".forkpoint", "objects/", "tmp/")
"""Beginnings of paths inside a repository that Forkpoint makes."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return [body for found, body in _FENCE.findall(text_of(document)) if found == language]


def spans(document: str) -> list[str]:
    """Everything written as code in running text."""
    return _SPAN.findall(_FENCE.sub("", text_of(document)))


def commands(document: str) -> Iterator[list[str]]:
    """Every ``forkpoint`` command that a document shows, as arguments."""
    for line in [line for block in blocks(document, "sh") for line in block.splitlines()] + spans(document):
        if _COMMAND.match(line):
            yield shlex.split(line.removesuffix("&").replace("...", ""))[1:]


def resolved(path: str) -> Path:
    """A path as documents write it: from the root of the repository, or below the package."""
    return next((base / path for base in (ROOT, PACKAGE) if (base / path).exists()), ROOT / path)


@cache
def definitions(path: Path) -> frozenset[str]:
    """What a module defines, with its classes' members as ``Class.member``."""
    return frozenset(_defined(ast.parse(path.read_text()).body, ""))


def _defined(body: list[ast.stmt], owner: str) -> Iterator[str]:
    for item in body:
        match item:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield owner + name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield owner + name
        if isinstance(item, ast.ClassDef):
            yield from _defined(item.body, f"{owner}{item.name}.")


@cache
def sources() -> str:
    return "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``forkpoint`` is this package's command, on one thread."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "forkpoint"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m forkpoint.cli.main "$@"\n')
    command.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FORKPOINT_")}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**environment, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def ran(arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a program and give what it printed; what it wrote on stderr is shown when it fails."""
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{arguments[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.model
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if blocks(each, "python")])
def test_programs_run_and_print_what_stands_beside_print(document: str, tmp_path: Path, shell: dict[str, str]) -> None:
    program = "\n".join(blocks(document, "python"))
    printed = ran([sys.executable, "-c", program], tmp_path, shell).splitlines()
    assert [line for line in _PRINTED.findall(program) if line not in printed] == []


@pytest.mark.model
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if blocks(each, "sh")])
def test_command_lines_run_one_after_another(document: str, tmp_path: Path, shell: dict[str, str]) -> None:
    script = "set -e\n" + "\n".join(blocks(document, "sh"))
    ran(["bash", "-c", script], tmp_path, shell)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_ones_that_the_command_line_takes(document: str) -> None:
    group: Any = typer.main.get_command(make_app())
    unknown = [words for words in commands(document) if words[0] not in group.commands]
    assert unknown == []


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if blocks(each, "sh")])
def test_options_are_ones_that_the_command_takes(document: str) -> None:
    group: Any = typer.main.get_command(make_app())
    for block in blocks(document, "sh"):
        for line in block.splitlines():
            if _COMMAND.match(line):
                _, verb, *arguments = shlex.split(line.removesuffix("&"))
                group.commands[verb].make_context(verb, arguments)  # raises for what it does not take


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    linked = [link for link in _LINK.findall(text_of(document)) if "://" not in link]
    broken = [link for link in linked if not (ROOT / document).parent.joinpath(link).exists()]
    named = [span.partition("::")[0] for span in spans(document)]
    paths = [path for path in named if _PATH.fullmatch(path) and not path.startswith(_NOT_HERE)]
    assert broken + [path for path in paths if not resolved(path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_functions_classes_and_tests_that_are_named_exist(document: str) -> None:
    named = [span.split("::") for span in spans(document) if "::" in span and span != "file::name"]
    assert [f"{path}::{name}" for path, name in named if name not in definitions(resolved(path))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_error_codes_that_are_named_are_raised_somewhere(document: str) -> None:
    codes = [match for span in spans(document) if (match := _CODE.fullmatch(span))]
    assert [match[0] for match in codes if f'"{match[2]}"' not in sources() or f"``{match[0]}``" not in sources()] == []


def test_every_promise_of_the_readme_names_a_test() -> None:
    _, _, table = text_of("README.md").partition("| promise | test |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert len(rows) > 10
    named = [re.fullmatch(r"\| [^|]+ \| `[\w/]+\.py::([\w.]+)` \|", row) for row in rows]
    assert [row for row, found in zip(rows, named, strict=True) if found is None] == []
    assert all(found and found[1].rpartition(".")[2].startswith("test_") for found in named)


def test_the_documents_are_those_of_the_repository() -> None:
    assert set(NAMES) | {"FORMAT.md"} == {path.name for path in ROOT.glob("*.md")}
