from __future__ import annotations

import re
from datetime import datetime

import pytest
from tests.cli.runner import run, run_json
from tests.cli.stories import SCENE, Story, written

from forkpoint.repo.repository import Repository
from forkpoint.state.canonical import from_float
from forkpoint.state.manifest import Parent

# ---- log ----


def test_log_shows_a_paragraph_for_each_manifest(story: Story) -> None:
    lines = run("log").lines
    assert lines[0] == f"llm {story.second[3:15]} (HEAD -> main)"
    assert lines[1] == f"Parents:  {story.first[3:15]}"
    assert re.fullmatch(r"Position: 425, \d\.\d KiB", lines[2])
    assert lines[3] == "Who:      ada@desk"
    assert datetime.fromisoformat(lines[4].removeprefix("Date:     ")).tzinfo is not None
    assert lines[5:10] == ["", "    the sea", "    ", "    it rises", ""]
    assert lines[10] == f"llm {story.first[3:15]} (tag: v1)"


def test_log_in_one_line_each(story: Story) -> None:
    assert run("log", "storm", "--oneline").lines == [
        f"{story.storm[3:15]} (storm) 442 a storm",
        f"{story.first[3:15]} (tag: v1) 407 the scene",
    ]
    assert run("log", "--oneline", "-n", "1").lines == [f"{story.second[3:15]} (HEAD -> main) 425 the sea"]
    assert run("log", "-n", "0").lines == []


def test_log_of_a_detached_head_names_it_apart(story: Story) -> None:
    run("checkout", "main~1")
    assert run("log", "--oneline").lines == [f"{story.first[3:15]} (HEAD, tag: v1) 407 the scene"]


def test_the_graph_of_all_refs_draws_every_branch(story: Story) -> None:
    assert run("log", "--graph", "--all", "--oneline").lines == [
        f"* {story.storm[3:15]} (storm) 442 a storm",
        f"| * {story.second[3:15]} (HEAD -> main) 425 the sea",
        "|/",
        f"* {story.first[3:15]} (tag: v1) 407 the scene",
    ]


def test_the_graph_runs_beside_paragraphs(story: Story) -> None:
    lines = run("log", "--graph", "--all").lines
    assert lines[0] == f"* llm {story.storm[3:15]} (storm)"
    assert lines[1] == f"| Parents:  {story.first[3:15]}"
    assert "|     a storm" in lines
    assert f"| * llm {story.second[3:15]} (HEAD -> main)" in lines


def test_log_as_json_has_every_fact(story: Story) -> None:
    newest, oldest = run_json("log")["entries"]
    assert set(newest) == {
        "added_tx", "added_us", "kind", "manifest_id", "message", "num_bytes", "parents", "position", "refs", "who",
    }  # fmt: skip
    assert newest["manifest_id"] == story.second
    assert newest["parents"] == [{"manifest_id": story.first, "role": "continues"}]
    assert newest["refs"] == ["HEAD", "refs/heads/main"]
    assert (newest["who"], newest["message"], newest["position"]) == ("ada@desk", "the sea\n\nit rises", 425)
    assert newest["added_us"] > oldest["added_us"] > 10**15
    assert [each["manifest_id"] for each in run_json("log", "--all")["entries"]] == [
        story.storm,
        story.second,
        story.first,
    ]


def test_log_as_of_an_earlier_transaction_shows_what_was_there_then(story: Story) -> None:
    first = run_json("log", "v1")["entries"][0]["added_tx"]
    then = run_json("log", "--all", "--as-of", str(first))["entries"]
    assert [(each["manifest_id"], each["refs"]) for each in then] == [(story.first, ["HEAD", "refs/heads/main"])]


def test_a_log_message_cannot_steer_the_terminal(story: Story) -> None:
    with Repository.open(story.folder) as repository:
        repository.publish(written(SCENE + "x", story.second), branch="main", message="red \x1b[31m alarm\x07")
    for arguments in (("log",), ("log", "--oneline"), ("reflog", "main"), ("status",), ("show",)):
        assert "\x1b" not in run(*arguments).out
    assert r"red \x1b[31m alarm\x07" in run("log", "--oneline").out


def test_a_parent_of_another_role_is_said_to_be_one(story: Story) -> None:
    adopted = Parent(role="adopts", manifest_id=story.storm)
    with Repository.open(story.folder) as repository:
        repository.publish(written(SCENE + "y", story.second, parents=[adopted]), branch="main", message="both")
    assert f"Parents:  {story.second[3:15]}, {story.storm[3:15]} (adopts)" in run("log").lines
    assert f"Parent:    {story.storm[3:15]} (adopts)" in run("show").lines
    lines = run("log", "--graph", "--oneline").lines
    assert lines[1] == "|\\"
    assert lines[-1].startswith("* ")


# ---- show ----


def test_show_tells_everything_about_one_manifest(story: Story) -> None:
    lines = run("show", "storm").lines
    assert lines[:4] == [
        f"llm {story.storm} (storm)",
        "Position:  442, pending token 13 '.'",
        "Prompt:    12 tokens; what follows was generated",
        "Sampling:  seed 7, top_k 0",
    ]
    assert lines[4] == "Trusted:   yes: computed or verified here"
    assert re.fullmatch(r"State:     [0-9a-f]{12} \(model tiny\)", lines[5])
    assert re.fullmatch(r"Execution: [0-9a-f]{12} \(machine cpu\)", lines[6])
    assert lines[7] == f"Parent:    {story.first[3:15]}"
    assert re.fullmatch(r"Chunks:    2 of \d\.\d KiB", lines[8])
    assert re.fullmatch(r"    attention \(tokens\): 2 chunks, \d\.\d KiB", lines[9])
    assert lines[10:13] == ["", "    a storm", ""]
    (text,) = lines[13:]
    assert text.startswith("  | ...")
    assert text.endswith("Then a storm came, naïve and loud.")
    assert len(text) == len("  | ...") + 300


def test_show_as_json_has_tokens_text_and_fingerprint(story: Story) -> None:
    record = run_json("show", "v1")
    assert set(record) == {
        "boundary", "fingerprint", "groups", "is_trusted", "kind", "manifest_id", "message", "num_bytes", "parents",
        "payload", "pending_text", "refs", "text", "tokens",
    }  # fmt: skip
    assert record["text"] == SCENE
    assert len(record["tokens"]) == len(SCENE)
    assert record["boundary"]["position"] == len(SCENE) - 1
    assert record["fingerprint"]["state"]["model"] == "tiny"
    assert record["groups"][0]["num_chunks"] == 2


def test_show_writes_floats_as_numbers(story: Story) -> None:
    from dataclasses import replace

    draft = written(SCENE + "z", story.second)
    warm = replace(draft, boundary={**draft.boundary, "sampling": {"temperature": from_float(0.8)}})
    with Repository.open(story.folder) as repository:
        repository.publish(warm, branch="main")
    assert "Sampling:  temperature 0.8" in run("show").lines


def test_sampling_is_shown_and_compared_in_decimals_and_kept_as_it_is_in_json(story: Story) -> None:
    from dataclasses import replace

    draft = written(SCENE + "z", story.second)
    options = {"temperature": (0.8).hex(), "logit_bias": [[5, (-1.5).hex()]], "stop": ["0x", "zzz"]}
    with Repository.open(story.folder) as repository:
        repository.publish(replace(draft, boundary={**draft.boundary, "sampling": options}), branch="main")
    assert "Sampling:  logit_bias [[5, -1.5]], stop ['0x', 'zzz'], temperature 0.8" in run("show").lines
    assert run_json("show")["boundary"]["sampling"] == options
    lines = run("diff", "main~1", "main").lines
    assert any(line.startswith("sampling: logit_bias: ") and line.endswith(" | [[5,-1.5]]") for line in lines)
    assert any(line.startswith("sampling: temperature: ") and line.endswith(" | 0.8") for line in lines)


def test_show_says_what_is_not_trusted(story: Story) -> None:
    run("snapshot", "storm", story.folder / "file")
    run("init", story.folder / "other")
    run("commit", story.folder / "file", "-C", story.folder / "other")
    assert (
        "Trusted:   no: it came from outside, and is used by name only"
        in run("show", "-C", story.folder / "other").lines
    )


@pytest.mark.parametrize(
    ("arguments", "code", "error", "words"),
    [
        (("show", "mian"), 3, "not_found.name", "did you mean main?"),
        (("show", "main~9"), 3, "not_found.name", "see forkpoint log"),
        (("show", "main@{x}"), 2, "invalid_input.revision", "is not a revision"),
        (("show", "ffffffffffff"), 3, "not_found.name", "nothing is named"),
        (("log", "main", "--all"), 2, "invalid_input.usage", "leave out NAME"),
        (("log", "-n", "-1"), 2, "invalid_input.usage", "see forkpoint log --help"),
        (("log", "--nope"), 2, "invalid_input.usage", "No such option"),
        (("diff", "main", "nothing"), 3, "not_found.name", "nothing is named"),
        (("diff",), 2, "invalid_input.usage", "see forkpoint diff --help"),
    ],
)
def test_what_cannot_be_shown_is_said_and_why(
    story: Story, arguments: tuple[str, ...], code: int, error: str, words: str
) -> None:
    told = run(*arguments)
    assert (told.code, told.out) == (code, "")
    assert f"[{error}]" in told.err
    assert words in told.err
    record = run_json(*arguments, code=code)
    assert (record["error"]["code"], record["exit_code"]) == (error, code)


def test_the_beginning_of_several_ids_is_ambiguous(story: Story) -> None:
    from tests.repo.drafts import draft_of

    with Repository.open(story.folder) as repository:
        beginnings: set[str] = set()
        for number in range(2000):
            digits = repository.publish(draft_of([1, number])).manifest_id[3:7]
            if digits in beginnings:
                break
            beginnings.add(digits)
        else:
            pytest.fail("no two ids of 2000 begin alike")
    record = run_json("show", digits, code=2)
    assert record["error"]["code"] == "invalid_input.ambiguous"
    assert record["error"]["data"]["num_candidates"] >= 2


# ---- diff ----


def test_diff_shows_where_two_histories_part_and_what_each_says(story: Story) -> None:
    lines = run("diff", "main", "storm").lines
    assert lines[:4] == [
        f"left   {story.second[3:15]}  main",
        f"right  {story.storm[3:15]}  storm",
        f"common ancestor: {story.first[3:15]}",
        "413 tokens in common, then 13 on the left and 30 on the right",
    ]
    assert lines[4].endswith("the light went out. Then ")
    assert lines[5:7] == ["  < the sea rose.", "  > a storm came, naïve and loud."]
    assert re.fullmatch(r"chunks: 1 shared \(.*\), 1 only left \(.*\), 1 only right \(.*\)", lines[7])
    assert lines[8:] == ["fingerprint: the same", "sampling: the same"]


def test_diff_with_one_name_compares_with_head(story: Story) -> None:
    assert run_json("diff", "storm") == run_json("diff", "storm", "main")


def test_diff_as_json_is_complete(story: Story) -> None:
    record = run_json("diff", "main", "storm")
    assert set(record) == {
        "chunks", "common_ancestor", "fingerprint", "left", "left_tokens", "num_common_tokens", "right", "right_tokens",
        "sampling", "text",
    }  # fmt: skip
    assert record["text"]["left"] == "the sea rose."
    assert len(record["left_tokens"]) == 13
    assert [record["chunks"][side]["num_chunks"] for side in ("shared", "left", "right")] == [1, 1, 1]


def test_diff_names_fields_of_identity_that_differ(story: Story) -> None:
    with Repository.open(story.folder) as repository:
        repository.publish(written(SCENE, model="other", machine="gpu"), branch="other")
    lines = run("diff", "v1", "other").lines
    assert 'fingerprint: execution.machine: "cpu" | "gpu"' in lines
    assert 'fingerprint: state.model: "tiny" | "other"' in lines
    assert "common ancestor: none is known here" in lines
    assert {"field": "state.model", "left": '"tiny"', "right": '"other"'} in run_json("diff", "v1", "other")[
        "fingerprint"
    ]


def test_diff_of_equals_says_so(story: Story) -> None:
    told = run("diff", "main", "main")
    assert told.code == 0
    assert told.lines[3] == "426 tokens in common, then 0 on the left and 0 on the right"
    assert "  <" not in told.out


def test_diff_cuts_long_sides_for_people_but_not_for_programs(story: Story) -> None:
    with Repository.open(story.folder) as repository:
        repository.publish(written(SCENE + "w" * 900, story.first), branch="long")
    assert "  > " + "w" * 400 + "... and 500 characters more" in run("diff", "v1", "long").lines
    assert run_json("diff", "v1", "long")["text"]["right"] == "w" * 900
