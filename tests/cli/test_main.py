from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.cli.runner import command, run, run_json, run_process, start
from tests.cli.stories import Story

from forkpoint.cli import repositories
from forkpoint.cli.main import MODULES, make_app
from forkpoint.cli.output import counted, in_decimal, printable, printable_text, shown_bytes
from forkpoint.errors import EXIT_CODES, Error
from forkpoint.repo.repository import Repository


def test_without_arguments_and_with_help_the_commands_are_listed() -> None:
    told = run()
    assert told == run("--help") == run("-h")
    assert told.code == 0
    for name in ("init", "log", "checkout", "fork", "fsck", "run", "demo"):
        assert f"  {name} " in told.out
    assert "demo-worker" not in told.out


def test_the_list_of_commands_cuts_no_sentence() -> None:
    assert not [line for line in run("--help").lines if line.endswith("...") and not line.startswith("Usage")]


COMMANDS = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name, each in COMMANDS.items() if not each.hidden])
def test_every_command_has_help_and_says_what_its_json_holds(name: str) -> None:
    told = run(name, "--help")
    assert told.code == 0
    assert "--json" in told.out
    assert "JSON" in told.out.partition("Options:")[0]


def test_the_version_is_told() -> None:
    assert run("--version").out == "forkpoint 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("lgo",), "No such command 'lgo'"),
        (("log", "--nope"), "No such option"),
        (("log", "-n", "many"), "--max-count"),
        (("show", "a", "b"), "b"),
        (("fork",), "NAME"),
    ],
)
def test_a_command_line_that_cannot_be_understood_exits_with_2(arguments: tuple[str, ...], words: str) -> None:
    told = run(*arguments)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("forkpoint: ")
    assert words.lower() in told.err.lower()
    assert "--help [invalid_input.usage]" in told.err
    record = run_json(*arguments, code=2)
    assert record["error"]["code"] == "invalid_input.usage"


@pytest.mark.parametrize("family", Error.__subclasses__(), ids=lambda family: family.family)
def test_every_error_family_has_its_exit_code(family: type[Error], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise family("it failed; do this", code="test", field="x", have=None)

    monkeypatch.setattr(repositories, "open_repository", fail)
    told = run("status")
    want = EXIT_CODES[family.family]
    assert (told.code, told.out, told.err) == (want, "", f"forkpoint: it failed; do this [{family.family}.test]\n")
    assert run_json("status", code=want) == {
        "error": {
            "code": f"{family.family}.test",
            "data": {"field": "x", "have": None},
            "message": "it failed; do this",
        },
        "exit_code": want,
    }


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repositories, "open_repository", interrupt)
    assert run("status").code == 130


def test_an_interrupt_with_json_gives_an_object_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(repositories, "open_repository", interrupt)
    record = run_json("status", code=130)
    assert (record["error"]["code"], record["exit_code"]) == ("error.interrupted", 130)


@pytest.mark.parametrize("error", [ZeroDivisionError("by 0"), OSError("by 0"), UnicodeError("by 0")], ids=type)
def test_our_own_bugs_are_told_in_a_line_and_shown_to_people(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise error

    monkeypatch.setattr(repositories, "open_repository", fail)
    told = run("status")
    message = f"internal error: {type(error).__name__}: by 0"
    assert (told.code, told.out) == (1, "")
    first, *rest = told.err.splitlines()
    assert first == f"forkpoint: {message} [error.internal]"
    assert rest[0].startswith("Traceback")
    quiet = run("status", "--json")
    assert (quiet.code, quiet.err) == (1, "")
    assert quiet.json == {"error": {"code": "error.internal", "data": {}, "message": message}, "exit_code": 1}


def test_an_output_in_another_encoding_takes_every_text(story: Story) -> None:
    with Repository.open(story.folder) as repository:
        repository.tag("日本", story.first)
    for arguments in (["tag"], ["tag", "--json"]):
        line, environment = command(arguments)
        done = subprocess.run(line, env=environment | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
        assert b"\\u65e5\\u672c" in done.stdout
        assert done.stderr == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["status", "show nothing", "lgo", "status --json", "snapshot main -", "commit -"])
def test_closed_streams_lead_to_nowhere(story: Story, words: str, closed: str) -> None:
    line, environment = command(words.split())
    whole = subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    shell = f"{' '.join(line)} {closed}"
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == whole.returncode
    assert b"Traceback" not in done.stderr
    assert done.stdout == (b"" if " >&-" in f" {closed}" else whole.stdout)


def test_processes_end_with_the_same_codes(story: Story) -> None:
    assert run_process("status").code == 0
    missing = run_process("show", "nothing")
    assert (missing.code, missing.out) == (3, "")
    assert "Traceback" not in missing.err
    assert run_process("lgo").code == 2
    assert json.loads(run_process("show", "nothing", "--json").out)["exit_code"] == 3


def test_a_reader_that_goes_away_is_no_error(story: Story) -> None:
    for arguments in (("log", "--all"), ("status",), ("show", "--json"), ("snapshot", "main", "-")):
        reader, writer = os.pipe()
        os.close(reader)
        with start(*arguments, stdout=writer) as process:
            os.close(writer)
            assert process.stderr is not None
            said = process.stderr.read()
        assert (process.returncode, said) == (0, ""), arguments


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("words", ["log", "log --json", "show main", "--version"])
def test_what_cannot_be_written_is_no_bug_of_ours_however_it_is_buffered(
    story: Story, words: str, buffering: str
) -> None:
    line, environment = command(words.split())
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            line, env=environment | {"PYTHONUNBUFFERED": buffering}, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )  # fmt: skip
    assert done.returncode == 8
    assert done.stderr.endswith("[unavailable.output]\n")
    assert "Traceback" not in done.stderr


def test_a_long_log_piped_to_head_ends_quietly(story: Story) -> None:
    line, environment = command(["log", "--all", "--json"])
    piped = f"{' '.join(line)} | head -c 5"
    done = subprocess.run(["bash", "-c", piped], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('{"ent', "")


def test_plain_commands_import_no_model_no_numpy_and_no_rich(story: Story) -> None:
    for arguments in (["log"], ["branch"], ["reflog", "main"], ["--help"], ["gc", "--dry-run"]):
        loaded = _modules_after(arguments)
        unwanted = {"torch", "transformers", "numpy", "rich", "alembic", "tokenizers"}
        assert not loaded & unwanted, arguments
    assert "sqlalchemy" not in _modules_after(["--help"])
    assert not _modules_after(["show"]) & {"torch", "transformers", "rich", "alembic"}


def test_sizes_and_counts_are_written_for_people() -> None:
    assert [shown_bytes(size) for size in (0, 1023, 1024, 1536, 1 << 20, 1048000, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1023.4 KiB", "5.0 TiB",
    ]  # fmt: skip
    assert [counted(1, "branch"), counted(2, "branch"), counted(0, "token"), counted(1200, "chunk")] == [
        "1 branch", "2 branches", "0 tokens", "1,200 chunks",
    ]  # fmt: skip
    assert printable("naïve\ttab 日本 \x1b[0m\r") == "naïve\ttab 日本 \\x1b[0m\\r"
    harmless = "50\u202f% \u3000 \U0001f469\u200d\U0001f52c"
    assert printable(harmless) == harmless
    assert printable("\u202e\u2028\x9b") == "\\u202e\\u2028\\x9b"


def test_a_stream_is_made_harmless_piece_by_piece_as_the_whole_is() -> None:
    text = "one\n\ttwo\x1b]0;title\x07\r\nthree"
    assert "".join(map(printable_text, text)) == printable_text(text) == "one\n\ttwo\\x1b]0;title\\x07\\r\nthree"


def test_floats_of_records_are_shown_in_decimals() -> None:
    for number in (0.8, 0.0, -1.5, 1e-300):
        assert in_decimal(f'[5, "{number.hex()}"]') == f"[5, {number!r}]"
    for text in ("0x1", "0x1.8p+9999", "abc", "12"):
        assert in_decimal(text) == text


def test_sigint_ends_a_waiting_command_with_130(tmp_path: Path) -> None:
    run("init", tmp_path)
    with start("commit", "-", "-C", tmp_path, stdin=subprocess.PIPE) as process:
        _wait_until_reading(process)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 130


def _wait_until_reading(process: subprocess.Popen[str]) -> None:
    """Until the command has its repository open: then it is about to read, and does nothing else."""
    for _ in range(600):
        names = _open_files(process.pid)
        if any(name.endswith("/lock") for name in names):
            time.sleep(0.3)
            return
        time.sleep(0.05)
    pytest.fail("the command never opened its repository")


def _open_files(pid: int) -> list[str]:
    names: list[str] = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            names.append(str(each.readlink()))
    return names


def _modules_after(arguments: list[str]) -> set[str]:
    """The top-level modules that a process has loaded when a command ends."""
    program = (
        "import sys, json\nfrom forkpoint.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "print(json.dumps(sorted({each.partition('.')[0] for each in sys.modules})), file=sys.stderr)\nsys.exit(code)"
    )
    _, environment = command([])
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr))


def test_every_command_is_found_in_the_module_that_the_table_names() -> None:
    for name, commands in MODULES.items():
        alone: Any = typer.main.get_command(make_app(commands[0]))
        assert set(alone.commands) == set(commands), name
    whole: Any = typer.main.get_command(make_app())
    assert set(whole.commands) == {command for commands in MODULES.values() for command in commands}


def test_a_command_imports_no_other_commands(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom forkpoint.cli.main import main\nmain(['init', sys.argv[1]])\n"
        "assert 'forkpoint.cli.chat' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "made")], check=True, stdout=subprocess.DEVNULL)
