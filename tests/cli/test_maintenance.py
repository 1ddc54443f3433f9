from __future__ import annotations

from pathlib import Path

from tests.cli.runner import run, run_json
from tests.cli.stories import SCENE, Story, written

from forkpoint.repo.repository import Repository


def abandon(story: Story) -> None:
    """Publish something that nothing keeps."""
    with Repository.open(story.folder) as repository:
        repository.publish(written("Another beginning. " * 20, model="other"))


def damage(story: Story, object_id: str) -> Path:
    (path,) = story.folder.rglob(f"*{object_id[5:]}*")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    return path


def tail_chunk(story: Story) -> str:
    with Repository.open(story.folder) as repository:
        return repository.manifest(story.second).groups[0].chunks[-1].chunk_id


# ---- gc ----


def test_a_dry_run_says_what_would_go_and_keeps_it(story: Story) -> None:
    abandon(story)
    told = run("gc", "--dry-run")
    assert told.code == 0
    assert told.lines[0].startswith("Would delete: 2 chunks, 1 manifest; ")
    record = run_json("gc", "--dry-run")
    assert (record["is_dry_run"], record["doomed"], record["kept"]["manifests"]) == (True, 3, 4)


def test_gc_deletes_what_nothing_leads_to(story: Story) -> None:
    abandon(story)
    expected = run_json("gc", "--dry-run")
    record = run_json("gc")
    assert set(record) == {"bytes_freed", "deleted", "doomed", "elapsed_us", "is_dry_run", "kept"}
    assert record["deleted"] == expected["deleted"] == {"chunk": 2, "manifest": 1, "move": 0, "tokenizer": 0}
    assert record["bytes_freed"] == expected["bytes_freed"] > 0
    assert (record["kept"]["manifests"], record["kept"]["chunks"]) == (3, 4)
    told = run("gc")
    assert told.lines[0] == "Deleted: nothing; 0 B"
    assert told.lines[1].startswith("Kept: 3 manifests, 4 chunks of ")
    assert run("verify", "storm").code == 0


# ---- fsck ----


def test_fsck_of_a_sound_repository_is_content(story: Story) -> None:
    told = run("fsck")
    assert (told.code, told.out, told.err) == (0, "All is well.\n", "")
    assert run_json("fsck") == {"findings": [], "num_errors": 0, "rebuilt": None, "repaired": []}


def test_leftovers_are_no_error(story: Story) -> None:
    abandon(story)
    with Repository.open(story.folder) as repository:
        repository.store.put(_stray())
    told = run("fsck")
    assert told.code == 0
    assert "forkpoint gc deletes them" in told.out
    assert told.lines[-1] == "0 errors, 1 other finding"


def test_fsck_finds_damage_and_exits_with_6(story: Story) -> None:
    chunk = tail_chunk(story)
    damage(story, chunk)
    told = run("fsck")
    assert told.code == 6
    assert told.lines[0].startswith(f"error: chunk {chunk[3:15]}: ")
    assert told.lines[1].startswith("    forkpoint fsck --repair")
    record = run_json("fsck", code=6)
    assert record["num_errors"] == 1
    (finding,) = record["findings"]
    assert set(finding) == {"code", "message", "objects", "remedy", "severity", "subject"}
    assert (finding["code"], finding["objects"]) == ("object_corrupt", [{"kind": "chunk", "object_id": chunk}])


def test_fsck_repairs_and_then_finds_all_well(story: Story) -> None:
    damage(story, tail_chunk(story))
    told = run("fsck", "--repair")
    assert told.code == 0
    assert any(line.startswith("repaired: main was at ") for line in told.lines)
    assert run_json("status")["head"]["manifest_id"] == story.first
    assert run("fsck").code == 0


def test_fsck_repair_of_a_sound_repository_does_nothing(story: Story) -> None:
    assert run_json("fsck", "--repair")["repaired"] == []


def test_a_lost_catalog_is_rebuilt_from_the_store(story: Story) -> None:
    before = run_json("log", "--all")["entries"]
    for path in (story.folder / ".forkpoint").glob("catalog.db*"):
        path.unlink()
    assert run_json("log", code=3)["error"]["code"] == "not_found.catalog"
    told = run("fsck", "--rebuild-catalog")
    assert told.code == 0
    assert told.lines[0].startswith("Rebuilt the catalog: 3 manifests, 4 refs, ")
    after = run_json("log", "--all")["entries"]
    assert {(each["manifest_id"], each["message"], each["who"], *each["refs"]) for each in after} == {
        (each["manifest_id"], each["message"], each["who"], *each["refs"]) for each in before
    }


def test_a_damaged_catalog_says_how_to_rebuild_it(story: Story) -> None:
    catalog = story.folder / ".forkpoint" / "catalog.db"
    catalog.write_bytes(b"not a database" * 100)
    refused = run("log")
    assert refused.code == 6
    assert "forkpoint fsck --rebuild-catalog" in refused.err
    record = run_json("fsck", "--rebuild-catalog")
    assert record["rebuilt"]["manifests"] == 3
    assert record["num_errors"] == 0


def test_a_catalog_in_use_is_not_replaced(story: Story) -> None:
    with Repository.open(story.folder):
        record = run_json("fsck", "--rebuild-catalog", code=8)
    assert record["error"]["code"] == "unavailable.repository_in_use"


# ---- verify ----


def test_verify_prints_a_receipt(story: Story) -> None:
    told = run("verify", "storm")
    assert told.out.startswith(f"{story.storm[3:15]}: 443 tokens, 2 chunks verified by digest, ")
    record = run_json("verify")
    assert set(record) == {"bytes_verified", "chunks_verified", "elapsed_us", "manifest_id", "tokens"}
    assert (record["manifest_id"], record["tokens"]) == (story.second, 426)


def test_verify_refuses_what_is_damaged_or_missing(story: Story) -> None:
    path = damage(story, tail_chunk(story))
    assert run_json("verify", code=6)["error"]["code"] == "corrupt.object"
    path.unlink()
    assert run_json("verify", code=3)["error"]["code"] == "not_found.object"
    assert run("verify", "nothing").code == 3


def _stray() -> object:
    from forkpoint.ids import ObjectKind
    from forkpoint.store.base import NewObject

    return NewObject(kind=ObjectKind.MANIFEST, parts=[_encoded()])


def _encoded() -> bytes:
    from forkpoint.state.draft import assemble
    from forkpoint.state.manifest import encode_manifest

    return encode_manifest(assemble(written(SCENE[:1]), []))
