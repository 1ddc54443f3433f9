from __future__ import annotations

import json

import pytest
from tests.cli.runner import run, run_json
from tests.cli.stories import Story, tokenizer

from forkpoint.ids import ObjectKind, digest_of
from forkpoint.repo.repository import Repository


def test_a_manifest_is_printed_as_json_under_its_name_or_id(story: Story) -> None:
    for name in ("main", "HEAD", "storm~1", story.second, story.second[3:], story.second[3:11], story.second[:11]):
        told = run("cat-file", name)
        assert told.code == 0
        assert json.loads(told.out)["format"] == "forkpoint.manifest"
    assert run("cat-file", "-p", "main").out == run("cat-file", "main").out


def test_kind_and_size_are_told_alone(story: Story) -> None:
    chunk = _chunk(story)
    assert run("cat-file", "-t", "main").out == "manifest\n"
    assert run("cat-file", "-t", chunk).out == "chunk\n"
    assert run("cat-file", "-t", digest_of([tokenizer()])).out == "tokenizer\n"
    with Repository.open(story.folder) as repository:
        size = repository.store.size(ObjectKind.CHUNK, chunk)
    assert run("cat-file", "-s", chunk[3:20]).out == f"{size}\n"


def test_a_chunk_is_printed_by_its_slabs(story: Story) -> None:
    assert run("cat-file", _chunk(story)).lines == [
        "token [0, 256)",
        "state            U8                   64 B  byte=64",
        "tokens           U32               1,024 B  token=256",
    ]


def test_a_move_and_a_tokenizer_can_be_looked_at(story: Story) -> None:
    with Repository.open(story.folder) as repository:
        move_id = repository.reflog("main")[0].move.move_id
    assert json.loads(run("cat-file", move_id).out)["message"] == "the sea\n\nit rises"
    assert run("cat-file", digest_of([tokenizer()])).out.startswith('{"version":')


def test_objects_as_json(story: Story) -> None:
    record = run_json("cat-file", _chunk(story))
    assert set(record) == {"content", "kind", "num_bytes", "object_id"}
    assert record["content"]["domain"] == [{"axis": "token", "start": 0, "stop": 256}]
    assert [each["name"] for each in record["content"]["slabs"]] == ["state", "tokens"]
    assert run_json("cat-file", "-t", "main") | {"num_bytes": 0} == {
        "content": None,
        "kind": "manifest",
        "num_bytes": 0,
        "object_id": story.second,
    }


def test_a_branch_whose_name_reads_like_an_id_wins(story: Story) -> None:
    name = story.first[3:9]
    assert run_json("cat-file", name)["object_id"] == story.first
    run("branch", name, "storm")
    assert run_json("cat-file", name)["object_id"] == story.storm


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("-t", "-s", "main"), 2, "invalid_input.usage"),
        (("nothing",), 3, "not_found.name"),
        (("0" * 64,), 3, "not_found.name"),
        (("b3:00000000",), 3, "not_found.name"),
        ((), 2, "invalid_input.usage"),
    ],
)
def test_what_is_no_object_is_refused(story: Story, arguments: tuple[str, ...], code: int, error: str) -> None:
    assert run("cat-file", *arguments).code == code
    assert run_json("cat-file", *arguments, code=code)["error"]["code"] == error


def test_the_beginning_of_two_objects_of_any_kind_is_ambiguous(story: Story) -> None:
    from tests.repo.drafts import draft_of

    seen: set[str] = set()
    with Repository.open(story.folder) as repository:
        for number in range(3000):
            shared = repository.publish(draft_of([1, number])).manifest_id[3:7]
            if shared in seen:
                break
            seen.add(shared)
    assert shared in seen
    assert run_json("cat-file", shared, code=2)["error"]["code"] == "invalid_input.ambiguous"


def _chunk(story: Story) -> str:
    with Repository.open(story.folder) as repository:
        return repository.manifest(story.second).groups[0].chunks[0].chunk_id
