"""A repository against a plain model of one: any order of publishing, naming, collecting, dying and rebuilding."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.repo.drafts import draft_of, fingerprint_of

from forkpoint.errors import Conflict, NotFound
from forkpoint.ids import ManifestId
from forkpoint.repo.repository import Repository

BRANCHES = st.sampled_from(["main", "left", "right"])
TAGS = st.sampled_from(["v1", "v2"])
BLOCKS = st.lists(st.sampled_from(["a", "b", "x"]), min_size=1, max_size=3)
SIZES = {"a": 256, "b": 300, "x": 3}
SHARED = Path("/dev/shm")


def tokens_of(blocks: tuple[str, ...]) -> list[int]:
    """Blocks of tokens, so that histories share prefixes often."""
    return [ord(block) * 1000 + i for block in blocks for i in range(SIZES[block])] + [7]


@dataclass
class Model:
    """What a repository is, in dicts and lists. A manifest is its tokens and its parent."""

    blocks: dict[ManifestId, tuple[str, ...]] = field(default_factory=dict)
    parent: dict[ManifestId, ManifestId | None] = field(default_factory=dict)
    refs: dict[str, ManifestId] = field(default_factory=dict)
    reflog: dict[str, list[ManifestId | None]] = field(default_factory=dict)
    head: str | ManifestId = "heads/main"

    def set(self, ref: str, value: ManifestId | None) -> None:
        if value is None:
            del self.refs[ref]
        else:
            self.refs[ref] = value
        self.reflog.setdefault(ref, []).insert(0, value)

    def head_value(self) -> ManifestId | None:
        return self.refs.get(self.head) if self.head.startswith("heads/") else ManifestId(self.head)

    def lineage(self, manifest_id: ManifestId | None) -> list[ManifestId]:
        found: list[ManifestId] = []
        while manifest_id is not None:
            found.append(manifest_id)
            manifest_id = self.parent[manifest_id]
        return found

    def kept(self) -> set[ManifestId]:
        """What collection must keep: nothing here is 90 days old, so all that a ref ever pointed at."""
        named = {each for values in self.reflog.values() for each in values if each is not None}
        return {each for name in named for each in self.lineage(name)}


class RepositoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="forkpoint-machine-", dir=SHARED if SHARED.is_dir() else None))
        self.repo = Repository.create(self.path, who="machine")
        self.model = Model()

    def teardown(self) -> None:
        self.repo.close()
        shutil.rmtree(self.path)

    @rule(branch=BRANCHES, blocks=BLOCKS)
    def extend(self, branch: str, blocks: list[str]) -> None:
        parent = self.model.refs.get(f"heads/{branch}")
        self._publish(branch, (*self.model.blocks.get(parent, ()), *blocks) if parent else tuple(blocks), parent)

    @rule(branch=BRANCHES, blocks=BLOCKS)
    def start_anew(self, branch: str, blocks: list[str]) -> None:
        self._publish(branch, tuple(blocks), None)

    @rule(blocks=BLOCKS)
    def publish_without_a_name(self, blocks: list[str]) -> None:
        published = self.repo.publish(draft_of(tokens_of(tuple(blocks))))
        self._record(published.manifest_id, tuple(blocks), None)

    def _publish(self, branch: str, blocks: tuple[str, ...], parent: ManifestId | None) -> None:
        ref = f"heads/{branch}"
        tip = self.model.refs.get(ref)
        draft = draft_of(tokens_of(blocks), parent=parent)
        try:
            published = self.repo.publish(draft, branch=branch).manifest_id
        except Conflict:
            assert tip is not None
            assert parent is None  # whatever extends a branch goes forward
            published = self.repo.publish(draft).manifest_id
            assert published != tip
            self._record(published, blocks, parent)
            return
        assert tip in (None, published, parent)
        self._record(published, blocks, parent)
        if tip != published:
            self.model.set(ref, published)

    def _record(self, manifest_id: ManifestId, blocks: tuple[str, ...], parent: ManifestId | None) -> None:
        assert self.model.blocks.setdefault(manifest_id, blocks) == blocks
        assert self.model.parent.setdefault(manifest_id, parent) == parent

    @precondition(lambda self: self.model.refs)
    @rule(data=st.data(), branch=BRANCHES)
    def branch_anywhere(self, data: st.DataObject, branch: str) -> None:
        source = data.draw(st.sampled_from(sorted(self.model.refs)))
        target = self.model.refs[source]
        self.repo.branch(branch, f"refs/{source}", expect="anything")
        if self.model.refs.get(f"heads/{branch}") != target:
            self.model.set(f"heads/{branch}", target)

    @precondition(lambda self: self.model.refs)
    @rule(data=st.data(), tag=TAGS)
    def tag_anything(self, data: st.DataObject, tag: str) -> None:
        target = self.model.refs[data.draw(st.sampled_from(sorted(self.model.refs)))]
        held = self.model.refs.get(f"tags/{tag}")
        if held not in (None, target):
            with pytest.raises(Conflict):
                self.repo.tag(tag, target)
            return
        self.repo.tag(tag, target)
        if held is None:
            self.model.set(f"tags/{tag}", target)

    @rule(branch=BRANCHES)
    def delete_a_branch(self, branch: str) -> None:
        ref = f"heads/{branch}"
        if ref not in self.model.refs:
            with pytest.raises(NotFound):
                self.repo.delete_branch(branch)
        elif self.model.head == ref:
            with pytest.raises(Conflict):
                self.repo.delete_branch(branch)
        else:
            self.repo.delete_branch(branch)
            self.model.set(ref, None)

    @rule(tag=TAGS)
    def delete_a_tag(self, tag: str) -> None:
        if f"tags/{tag}" in self.model.refs:
            self.repo.delete_tag(tag)
            self.model.set(f"tags/{tag}", None)

    @rule(branch=BRANCHES)
    def check_out_a_branch(self, branch: str) -> None:
        if f"heads/{branch}" not in self.model.refs:
            with pytest.raises(NotFound):
                self.repo.checkout(branch)
            return
        self.repo.checkout(branch)
        self.model.head = f"heads/{branch}"

    @precondition(lambda self: self.model.refs)
    @rule(data=st.data())
    def check_out_a_manifest(self, data: st.DataObject) -> None:
        target = self.model.refs[data.draw(st.sampled_from(sorted(self.model.refs)))]
        self.repo.checkout(target)
        self.model.head = target
        self.model.reflog.setdefault("HEAD", []).insert(0, target)

    @rule()
    def collect(self) -> None:
        self.repo.collect()
        kept = self.model.kept()
        assert {row.manifest_id for row in self.repo.catalog.manifests()} == kept
        self._forget_all_but(kept)

    @rule()
    def crash(self) -> None:
        """The object is dropped as a dead process would drop it; its connections close with it, in no order of ours."""
        dead, self.repo = self.repo, Repository.open(self.path, who="machine")
        dead.catalog.close()
        assert dead._occupancy is not None
        dead._occupancy.end()

    @rule()
    def rebuild(self) -> None:
        self.repo.close()
        report = Repository.rebuild_catalog(self.path)
        assert report.problems == ()
        self.repo = Repository.open(self.path, who="machine")

    @rule()
    def fsck(self) -> None:
        assert [each for each in self.repo.check() if each.severity != "info"] == []

    def _forget_all_but(self, kept: set[ManifestId]) -> None:
        for gone in self.model.blocks.keys() - kept:
            del self.model.blocks[gone], self.model.parent[gone]
            with pytest.raises(NotFound):
                self.repo.resolve(gone)

    @invariant()
    def names_mean_what_the_model_says(self) -> None:
        listed = {f"heads/{ref.name}": ref.manifest_id for ref in self.repo.branches()}
        listed |= {f"tags/{ref.name}": ref.manifest_id for ref in self.repo.tags()}
        assert listed == self.model.refs
        head = self.repo.head()
        assert head.manifest_id == self.model.head_value()
        assert head.branch == (self.model.head[6:] if self.model.head.startswith("heads/") else None)

    @invariant()
    def histories_are_those_of_the_model(self) -> None:
        for ref, value in self.model.refs.items():
            name = f"refs/{ref}"
            lineage = self.model.lineage(value)
            assert [entry.row.manifest_id for entry in self.repo.log(name)] == lineage
            assert [self.repo.resolve(f"{name}~{n}") for n in range(len(lineage))] == lineage
            assert self.repo.tokens(value) == tokens_of(self.model.blocks[value])
        for ref, values in self.model.reflog.items():
            if ref != "HEAD":
                assert [entry.manifest_id for entry in self.repo.reflog(f"refs/{ref}")] == values

    @invariant()
    def stored_prefixes_are_found(self) -> None:
        for value in self.model.refs.values():
            tokens = tokens_of(self.model.blocks[value])
            match = self.repo.find_prefix(fingerprint_of(), tokens, ["attention"])
            assert (match.num_tokens if match else 0) == (len(tokens) - 1) // 256 * 256


TestRepository = RepositoryMachine.TestCase
TestRepository.settings = settings(stateful_step_count=15, max_examples=8)


class LongRepositoryMachine(RepositoryMachine):
    pass


@pytest.mark.full
class TestRepositoryAtLength(LongRepositoryMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(stateful_step_count=50, max_examples=100)
