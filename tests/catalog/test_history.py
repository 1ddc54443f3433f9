"""As-of answers against a model: a plain Python value that is copied at every transaction."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.catalog.transaction import Transaction
from forkpoint.ids import ObjectId
from forkpoint.testing.catalog_contract import (
    EXECUTION,
    chunk_ref,
    manifest_row,
    move_row,
    named,
    point,
    prefix_row,
)

MANIFESTS = ["m0", "m1", "m2", "m3", "m4"]
CHUNKS = ["c0", "c1", "c2"]
KEYS = ["k0", "k1", "k2"]
GROUPS = ["boundary", "full"]
REFS = ["HEAD", "refs/heads/a", "refs/heads/b"]

PARENTS: dict[str, tuple[str, ...]] = {
    "m0": (),
    "m1": ("m0",),
    "m2": ("m0", "never added"),
    "m3": ("m2", "m1"),
    "m4": ("m3", "m0"),
}
INTRODUCES: dict[str, tuple[str, ...]] = {"m0": ("c0",), "m1": ("c1",), "m2": (), "m3": ("c1", "c2"), "m4": ("c0",)}


@dataclass
class Model:
    """What is true now."""

    trusted: dict[str, bool] = field(default_factory=dict)
    chunks: set[str] = field(default_factory=set)
    refs: dict[str, str] = field(default_factory=dict)
    moves: list[tuple[str, str | None]] = field(default_factory=list)
    prefixes: dict[tuple[str, str], str] = field(default_factory=dict)

    def reachable(self, name: str) -> set[str]:
        if name not in self.trusted:
            return set()
        return {name}.union(*(self.reachable(parent) for parent in PARENTS[name]))

    def num_prefix_chunks(self) -> int:
        complete = [i for i, key in enumerate(KEYS, 1) if all((key, group) in self.prefixes for group in GROUPS)]
        return max(complete, default=0)


def ids(names: set[str]) -> set[ObjectId]:
    return {named(name) for name in names}


@cache
def empty_catalog() -> bytes:
    """The file of an empty catalog: reading it is faster than migrating one for every example."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.sqlite"
        Catalog.create(sqlite_url(path)).close()
        return path.read_bytes()


class History(RuleBasedStateMachine):
    """Each rule is one transaction of one or several changes; after the last, every transaction is asked again."""

    @initialize()
    def create(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "catalog.sqlite"
        path.write_bytes(empty_catalog())
        self.catalog = Catalog.open(sqlite_url(path))
        self.now = Model()
        self.past = [copy.deepcopy(self.now)]

    def teardown(self) -> None:
        if not hasattr(self, "catalog"):
            return
        try:
            for tx, model in enumerate(self.past):
                self.compare(model, tx)
            self.compare(self.now, None)
        finally:
            self.catalog.close()
            self.folder.cleanup()

    @rule(names=strategies.lists(strategies.sampled_from(MANIFESTS), max_size=3), is_trusted=strategies.booleans())
    def add(self, names: list[str], is_trusted: bool) -> None:
        with self.catalog.transaction(reason="add") as tx:
            self.add_manifests(tx, names, is_trusted)
        self.past.append(copy.deepcopy(self.now))

    @rule(
        names=strategies.sets(strategies.sampled_from(MANIFESTS)),
        chunks=strategies.sets(strategies.sampled_from(CHUNKS)),
    )
    def collect(self, names: set[str], chunks: set[str]) -> None:
        with self.catalog.transaction(reason="collect") as tx:
            self.remove_manifests(tx, names, chunks)
        self.past.append(copy.deepcopy(self.now))

    @rule(chunks=strategies.sets(strategies.sampled_from(CHUNKS)))
    def lose(self, chunks: set[str]) -> None:
        with self.catalog.transaction(reason="lose") as tx:
            tx.remove_chunks(ids(chunks))
        self.now.chunks -= chunks
        self.now.prefixes = {key: chunk for key, chunk in self.now.prefixes.items() if chunk not in chunks}
        self.past.append(copy.deepcopy(self.now))

    @rule(
        keys=strategies.lists(strategies.sampled_from(KEYS), min_size=1),
        group=strategies.sampled_from(GROUPS),
        chunk=strategies.sampled_from(CHUNKS),
    )
    def index(self, keys: list[str], group: str, chunk: str) -> None:
        with self.catalog.transaction(reason="index") as tx:
            tx.add_prefixes(prefix_row(key, group=group, index=KEYS.index(key), chunk=chunk) for key in keys)
        for key in keys:
            self.now.prefixes.setdefault((key, group), chunk)
        self.past.append(copy.deepcopy(self.now))

    @rule(ref=strategies.sampled_from(REFS), names=strategies.lists(strategies.sampled_from(MANIFESTS), max_size=2))
    def move(self, ref: str, names: list[str]) -> None:
        with self.catalog.transaction(reason="move") as tx:
            for name in names:
                if name in self.now.trusted:
                    point(tx, ref, name)
                    self.now.refs[ref] = name
                    self.now.moves.append((ref, name))
        self.past.append(copy.deepcopy(self.now))

    @rule(ref=strategies.sampled_from(REFS), name=strategies.sampled_from(MANIFESTS), is_kept=strategies.booleans())
    def delete(self, ref: str, name: str, is_kept: bool) -> None:
        if ref not in self.now.refs:
            return
        with self.catalog.transaction(reason="delete") as tx:
            tx.delete_ref(ref, move_row(tx, ref, None))
            del self.now.refs[ref]
            self.now.moves.append((ref, None))
            if is_kept and name in self.now.trusted:
                point(tx, ref, name)
                self.now.refs[ref] = name
                self.now.moves.append((ref, name))
        self.past.append(copy.deepcopy(self.now))

    def add_manifests(self, tx: Transaction, names: list[str], is_trusted: bool) -> None:
        for name in names:
            row = manifest_row(name, parents=PARENTS[name], chunks=INTRODUCES[name], is_trusted=is_trusted)
            assert tx.add_manifest(row) == (name not in self.now.trusted)
            if name not in self.now.trusted:
                self.now.chunks |= set(INTRODUCES[name])
            self.now.trusted[name] = self.now.trusted.get(name, False) or is_trusted

    def remove_manifests(self, tx: Transaction, names: set[str], chunks: set[str]) -> None:
        tx.rescue(map(chunk_ref, CHUNKS))
        tx.doom(map(chunk_ref, chunks))
        tx.remove_manifests(ids(names))
        gone = {chunk for name in names & set(self.now.trusted) for chunk in INTRODUCES[name] if chunk in chunks}
        self.now.trusted = {name: trust for name, trust in self.now.trusted.items() if name not in names}
        self.now.prefixes = {key: chunk for key, chunk in self.now.prefixes.items() if chunk not in gone}

    def compare(self, model: Model, as_of: int | None) -> None:
        catalog = self.catalog
        rows = {row.message: row for row in catalog.manifests(as_of)}
        assert {name: row.is_trusted for name, row in rows.items()} == model.trusted
        for name, row in rows.items():
            trust = model.trusted[name]
            expected = manifest_row(name, parents=PARENTS[name], chunks=INTRODUCES[name], is_trusted=trust)
            assert row == expected == catalog.get_manifest(named(name), as_of)
        assert set(catalog.live_manifests(as_of)) == ids(set(model.trusted))
        assert {row.chunk_id for row in catalog.live_chunks(as_of)} == ids(model.chunks)
        for name in MANIFESTS:
            self.compare_lineage(model, name, as_of)
        assert {row.name: row.target for row in catalog.refs(as_of=as_of)} == {
            ref: named(name) for ref, name in model.refs.items()
        }
        assert [(move.ref, move.new) for move in catalog.moves(as_of=as_of)] == [
            (ref, None if name is None else named(name)) for ref, name in reversed(model.moves)
        ]
        match = catalog.longest_prefix([named(key) for key in KEYS], EXECUTION, GROUPS, as_of)
        assert match.num_chunks == model.num_prefix_chunks()
        assert {(row.index, row.group): row.chunk_id for row in match.rows} == {
            (KEYS.index(key), group): named(chunk)
            for (key, group), chunk in model.prefixes.items()
            if KEYS.index(key) < match.num_chunks
        }

    def compare_lineage(self, model: Model, name: str, as_of: int | None) -> None:
        reached = model.reachable(name)
        assert self.catalog.reachable([named(name)], as_of) == ids(reached)
        logged = [row.message for row in self.catalog.ancestors(named(name), as_of=as_of)]
        assert sorted(logged) == sorted(reached)
        for child in logged:
            assert all(logged.index(child) < logged.index(parent) for parent in PARENTS[child] if parent in logged)
        assert self.catalog.is_ancestor(named("m0"), named(name), as_of) == ("m0" in reached)


TestHistory = History.TestCase
TestHistory.settings = settings(stateful_step_count=12)
