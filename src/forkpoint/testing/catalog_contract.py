"""What every catalog must do, whatever database keeps it: inherit ``CatalogContract`` and say how one is created.

class TestSqliteCatalog(CatalogContract):
    def create(self, folder: Path) -> Catalog:
        return Catalog.create(sqlite_url(folder / "catalog.sqlite"))
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.records import (
    ChunkRow,
    DemandKind,
    ManifestRow,
    MoveRow,
    ObjectRef,
    ParentEdge,
    PrefixRow,
)
from forkpoint.catalog.transaction import Transaction
from forkpoint.errors import Conflict, InvalidInput, NotFound
from forkpoint.ids import ObjectId, ObjectKind, digest_of

MAIN = "refs/heads/main"


def named(name: str) -> ObjectId:
    """The id that stands for ``name`` in a test."""
    return digest_of([name.encode()])


EXECUTION = named("execution")


def manifest_row(
    name: str, *, parents: tuple[str, ...] = (), chunks: tuple[str, ...] = (), is_trusted: bool = True
) -> ManifestRow:
    """A manifest whose id, message, parents and chunks are named; a chunk of name ``abc`` has 3 bytes."""
    introduced = [ChunkRow(chunk_id=named(chunk), num_bytes=len(chunk)) for chunk in chunks]
    return ManifestRow(
        manifest_id=named(name),
        kind="llm",
        state_id=named("state"),
        execution_id=EXECUTION,
        position=len(name),
        pending=None,
        num_bytes=100,
        message=name,
        is_trusted=is_trusted,
        tokenizer_id=named("tokenizer"),
        parents=tuple(ParentEdge(role="continues", manifest_id=named(parent)) for parent in parents),
        introduced=tuple(sorted(introduced, key=lambda row: row.chunk_id)),
    )


def prefix_row(key: str, *, group: str = "full", index: int = 0, chunk: str = "chunk") -> PrefixRow:
    return PrefixRow(key=named(key), execution_id=EXECUTION, group=group, index=index, chunk_id=named(chunk))


def move_row(tx: Transaction, ref: str, new: str | None) -> MoveRow:
    """The move of ``ref`` from what it is to ``new``."""
    now = tx.find_ref(ref)
    old = None if now is None else now.target or f"ref:{now.symbolic}"
    previous = tx.last_move_id(ref)
    return MoveRow(
        move_id=named(f"{previous} {ref} {old} {new}"),
        previous=previous,
        ref=ref,
        old=old,
        new=new,
        tx=tx.number,
        at_us=tx.at_us,
        who="somebody",
        message=f"to {new}",
        is_trusted=True,
    )


def point(tx: Transaction, ref: str, name: str) -> None:
    """Set ``ref`` to the manifest named ``name``."""
    tx.set_ref(ref, target=named(name), move=move_row(tx, ref, named(name)))


def chunk_ref(name: str) -> ObjectRef:
    return ObjectRef(kind=ObjectKind.CHUNK, object_id=named(name))


def add(catalog: Catalog, *rows: ManifestRow) -> int:
    """Add manifests in one transaction; returns its number."""
    with catalog.transaction(reason="add") as tx:
        tx.add_manifests(rows)
        return tx.number


class CatalogContract(ABC):
    """Inherit and implement ``create``; the inheritor's name must start with ``Test``."""

    @abstractmethod
    def create(self, folder: Path) -> Catalog:
        """A new, empty catalog; ``folder`` is empty and goes away after the test."""

    @pytest.fixture
    def catalog(self, tmp_path: Path) -> Iterator[Catalog]:
        catalog = self.create(tmp_path)
        yield catalog
        assert catalog.check() == []
        catalog.close()

    # Transactions

    def test_transactions_are_numbered_from_one_and_keep_their_reason(self, catalog: Catalog) -> None:
        assert catalog.current_tx() == 0
        for reason in ("first", "second"):
            with catalog.transaction(reason=reason):
                pass
        assert [(row.tx, row.reason) for row in catalog.transactions()] == [(2, "second"), (1, "first")]
        assert [row.tx for row in catalog.transactions(limit=1)] == [2]

    def test_a_transaction_that_raises_leaves_nothing_behind(self, catalog: Catalog) -> None:
        def fail(tx: Transaction) -> None:
            tx.add_manifest(manifest_row("a"))
            point(tx, MAIN, "a")
            raise KeyError

        with pytest.raises(KeyError), catalog.transaction(reason="fails") as tx:
            fail(tx)
        assert catalog.current_tx() == 0
        assert list(catalog.manifests()) == [] == catalog.refs()
        assert catalog.moves() == []

    def test_a_transaction_reads_its_own_writes_before_others_do(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="writes") as tx:
            tx.add_manifest(manifest_row("a"))
            point(tx, MAIN, "a")
            assert tx.get_manifest(named("a")).message == "a"
            assert catalog.find_manifest(named("a")) is None
            assert catalog.find_ref(MAIN) is None
        assert catalog.find_manifest(named("a")) is not None

    def test_times_come_from_the_clock_and_lead_back_to_transactions(self, catalog: Catalog) -> None:
        first = add(catalog, manifest_row("a"))
        at_us = catalog.transactions()[0].at_us
        assert abs(at_us - time.time_ns() // 1000) < 60_000_000
        assert catalog.tx_at(at_us - 1) == 0
        assert catalog.tx_at(at_us) == first

    # Manifests

    def test_a_manifest_reads_back_as_it_was_written(self, catalog: Catalog) -> None:
        row = manifest_row('it\'s ünïcode; "quoted" 🍴', parents=("p", "q"), chunks=("one", "three", "two"))
        add(catalog, row)
        assert catalog.get_manifest(row.manifest_id) == row
        assert list(catalog.manifests()) == [row]

    def test_a_manifest_without_edges_reads_back_as_it_was_written(self, catalog: Catalog) -> None:
        row = manifest_row("a")
        add(catalog, row)
        assert catalog.get_manifest(row.manifest_id) == row

    def test_an_absent_manifest_is_not_found(self, catalog: Catalog) -> None:
        assert catalog.find_manifest(named("a")) is None
        with pytest.raises(NotFound) as caught:
            catalog.get_manifest(named("a"))
        assert caught.value.code == "not_found.manifest"

    def test_adding_a_manifest_again_changes_nothing(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="twice") as tx:
            assert tx.add_manifest(manifest_row("a", chunks=("one",)))
            assert not tx.add_manifest(manifest_row("a", chunks=("one",)))
        assert len(list(catalog.manifests())) == 1
        assert catalog.counts().num_chunks == 1

    def test_a_manifest_twice_in_one_batch_is_added_once(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="twice") as tx:
            assert tx.add_manifests([manifest_row("a"), manifest_row("a"), manifest_row("b")]) == 2

    def test_a_removed_manifest_stays_true_for_earlier_transactions_and_can_come_back(self, catalog: Catalog) -> None:
        added = add(catalog, manifest_row("a", chunks=("one",)))
        with catalog.transaction(reason="gc") as tx:
            tx.remove_manifests([named("a")])
            tx.remove_chunks([named("one")])
        back = add(catalog, manifest_row("a", chunks=("one", "two")))
        assert catalog.find_manifest(named("a"), as_of=added - 1) is None
        assert catalog.get_manifest(named("a"), as_of=added) == manifest_row("a", chunks=("one",))
        assert catalog.find_manifest(named("a"), as_of=added + 1) is None
        assert catalog.get_manifest(named("a"), as_of=back) == manifest_row("a", chunks=("one", "two"))
        assert [catalog.counts(as_of=tx).num_chunks for tx in range(back + 1)] == [0, 1, 0, 2]

    def test_a_fact_added_and_removed_by_one_transaction_was_never_true(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="both") as tx:
            tx.add_manifest(manifest_row("a"))
            tx.remove_manifests([named("a")])
        assert catalog.find_manifest(named("a"), as_of=1) is None

    def test_a_manifest_becomes_trusted_when_a_trusted_row_arrives(self, catalog: Catalog) -> None:
        fetched = add(catalog, manifest_row("a", is_trusted=False))
        assert not catalog.get_manifest(named("a")).is_trusted
        add(catalog, manifest_row("a", is_trusted=True))
        assert catalog.get_manifest(named("a")).is_trusted
        assert not catalog.get_manifest(named("a"), as_of=fetched).is_trusted
        add(catalog, manifest_row("a", is_trusted=False))
        assert catalog.get_manifest(named("a")).is_trusted

    def test_has_manifests_answers_with_those_that_are_live(self, catalog: Catalog) -> None:
        tx = add(catalog, manifest_row("a"), manifest_row("b"))
        wanted = [named("a"), named("b"), named("c")]
        assert catalog.has_manifests(wanted) == {named("a"), named("b")}
        assert catalog.has_manifests(wanted, as_of=tx - 1) == set()

    def test_more_ids_than_a_statement_takes_are_asked_in_batches(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"))
        many = [named(str(i)) for i in range(40_000)]
        assert catalog.has_manifests([*many, named("a")]) == {named("a")}

    def test_ids_are_found_by_any_number_of_leading_digits(self, catalog: Catalog) -> None:
        add(catalog, *(manifest_row(str(i)) for i in range(300)))
        every = sorted(named(str(i)) for i in range(300))
        for num_digits in (1, 2, 3, 64):
            digits = every[17][3 : 3 + num_digits]
            expected = [i for i in every if i[3:].startswith(digits)]
            assert catalog.find_manifests_by_prefix(digits, limit=300) == expected
        assert len(catalog.find_manifests_by_prefix(every[0][3], limit=2)) == 2

    @pytest.mark.parametrize("text", ["", "xyz", "AB", "0" * 65, "%"])
    def test_what_is_no_start_of_an_id_is_refused(self, catalog: Catalog, text: str) -> None:
        with pytest.raises(InvalidInput):
            catalog.find_manifests_by_prefix(text)

    def test_a_stream_shows_what_was_true_when_it_started(self, catalog: Catalog) -> None:
        add(catalog, *(manifest_row(str(i), chunks=(f"chunk {i}",)) for i in range(2_500)))
        manifests, chunks = catalog.manifests(), catalog.live_chunks()
        next(manifests), next(chunks)
        with catalog.transaction(reason="meanwhile") as tx:
            tx.add_manifest(manifest_row("late", chunks=("late",)))
            tx.remove_manifests([named("2499")])
        assert sum(1 for _ in manifests) == sum(1 for _ in chunks) == 2_499
        assert sum(1 for _ in catalog.live_manifests()) == 2_500

    def test_chunks_lead_to_the_manifests_that_introduce_them_and_back(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a", chunks=("one", "two")), manifest_row("b", chunks=("two",)))
        assert sorted(catalog.chunks_of([named("a"), named("b")])) == sorted(map(named, ["one", "two", "two"]))
        assert catalog.manifests_introducing([named("two")]) == {named("a"), named("b")}
        assert catalog.manifests_introducing([named("one")]) == {named("a")}
        assert catalog.has_chunks([named("one"), named("none")]) == {named("one")}

    # Lineage

    def test_ancestors_come_newest_first_and_never_before_a_child(self, catalog: Catalog) -> None:
        # The parents of d were added after it, as when a shallow history is deepened.
        add(catalog, manifest_row("root"))
        add(catalog, manifest_row("d", parents=("b", "c")))
        add(catalog, manifest_row("b", parents=("root",)), manifest_row("c", parents=("root",)))
        assert [row.message for row in catalog.ancestors(named("d"))] == ["d", "c", "b", "root"]
        assert [row.message for row in catalog.ancestors(named("d"), limit=2)] == ["d", "c"]
        assert [row.message for row in catalog.ancestors(named("d"), as_of=2)] == ["d"]
        assert catalog.ancestors(named("nothing")) == []

    def test_a_log_row_says_what_a_log_prints(self, catalog: Catalog) -> None:
        row = manifest_row("a", parents=("p", "absent"))
        number = add(catalog, manifest_row("p"), row)
        logged = catalog.ancestors(named("a"))[0]
        assert (logged.manifest_id, logged.parents, logged.kind) == (row.manifest_id, row.parents, row.kind)
        assert (logged.position, logged.num_bytes, logged.message) == (row.position, row.num_bytes, row.message)
        assert (logged.added_tx, logged.added_us) == (number, catalog.transactions()[0].at_us)

    def test_a_walk_ends_at_an_absent_parent(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("b", parents=("a",)), manifest_row("c", parents=("b",)))
        with catalog.transaction(reason="gc") as tx:
            tx.remove_manifests([named("b")])
        assert [row.message for row in catalog.ancestors(named("c"))] == ["c"]
        assert catalog.reachable([named("c")]) == {named("c")}
        assert catalog.reachable([named("c")], as_of=1) == {named("a"), named("b"), named("c")}
        assert catalog.first_parent(named("c"), 1) is None

    def test_first_parents_are_counted_from_the_manifest_itself(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("side"), manifest_row("b", parents=("a", "side")))
        add(catalog, manifest_row("c", parents=("b", "side")))
        found = [catalog.first_parent(named("c"), n) for n in range(4)]
        assert found == [named("c"), named("b"), named("a"), None]

    def test_descent_is_known_through_every_parent(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("b"), manifest_row("c", parents=("a", "b")))
        assert catalog.is_ancestor(named("a"), named("c"))
        assert catalog.is_ancestor(named("b"), named("c"))
        assert catalog.is_ancestor(named("c"), named("c"))
        assert not catalog.is_ancestor(named("c"), named("a"))
        assert not catalog.is_ancestor(named("a"), named("b"))
        assert not catalog.is_ancestor(named("absent"), named("c"))

    def test_reachable_is_closed_over_parents(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("b", parents=("a",)), manifest_row("other"))
        assert catalog.reachable([named("b"), named("absent")]) == {named("a"), named("b")}
        assert catalog.reachable([]) == set()

    # Refs and moves

    def test_a_ref_moves_and_its_past_stays_known(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("b"))
        for name in ("a", "b"):
            with catalog.transaction(reason=name) as tx:
                point(tx, MAIN, name)
        with catalog.transaction(reason="delete") as tx:
            tx.delete_ref(MAIN, move_row(tx, MAIN, None))
        targets = [ref.target if (ref := catalog.find_ref(MAIN, as_of=tx)) else None for tx in range(1, 5)]
        assert targets == [None, named("a"), named("b"), None]
        assert catalog.find_ref(MAIN) is None
        assert [catalog.ref_at(MAIN, n) for n in range(4)] == [None, named("b"), named("a"), None]

    def test_the_moves_of_a_ref_form_a_chain_that_outlives_it(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("b"))
        for name in ("a", "b"):
            with catalog.transaction(reason=name) as tx:
                point(tx, MAIN, name)
                point(tx, "refs/heads/other", name)
        with catalog.transaction(reason="delete") as tx:
            tx.delete_ref(MAIN, move_row(tx, MAIN, None))
        newest, middle, oldest = catalog.moves(MAIN)
        assert (newest.new, middle.new, oldest.new) == (None, named("b"), named("a"))
        assert (newest.old, middle.old, oldest.old) == (named("b"), named("a"), None)
        assert (newest.previous, middle.previous, oldest.previous) == (middle.move_id, oldest.move_id, None)
        assert catalog.last_move_id(MAIN) == newest.move_id
        assert len(catalog.moves()) == 5
        assert catalog.moves(limit=1) == [newest]
        assert catalog.moves(MAIN, as_of=2) == [oldest]

    def test_a_move_can_be_recorded_without_moving_its_ref(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="rebuild") as tx:
            tx.add_move(move_row(tx, MAIN, named("gone")))
        assert [(move.ref, move.new) for move in catalog.moves()] == [(MAIN, named("gone"))]
        assert catalog.find_ref(MAIN) is None

    def test_a_symbolic_ref_names_another(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="init") as tx:
            tx.set_ref("HEAD", symbolic=MAIN, move=move_row(tx, "HEAD", f"ref:{MAIN}"))
        head = catalog.find_ref("HEAD")
        assert head is not None
        assert (head.symbolic, head.target) == (MAIN, None)

    def test_refs_are_listed_by_name_under_an_exact_prefix(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"))
        with catalog.transaction(reason="refs") as tx:
            for name in ("refs/tags/z", "refs/heads/b_c", "refs/heads/bxc", "refs/heads/B_c", "refs/heads/ä"):
                point(tx, name, "a")
        assert [ref.name for ref in catalog.refs("refs/heads/b_")] == ["refs/heads/b_c"]
        assert [ref.name[11:] for ref in catalog.refs("refs/heads/")] == ["B_c", "b_c", "bxc", "ä"]
        assert len(catalog.refs()) == 5
        assert catalog.refs(as_of=1) == []

    def test_a_ref_cannot_be_set_to_a_manifest_that_was_collected(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"))
        with catalog.transaction(reason="gc") as tx:
            tx.remove_manifests([named("a")])
        with pytest.raises(NotFound), catalog.transaction(reason="too late") as tx:
            point(tx, MAIN, "a")
        assert catalog.moves() == []

    def test_an_absent_ref_cannot_be_deleted(self, catalog: Catalog) -> None:
        with pytest.raises(NotFound) as caught, catalog.transaction(reason="delete") as tx:
            tx.delete_ref(MAIN, move_row(tx, MAIN, None))
        assert caught.value.code == "not_found.ref"

    def test_threads_that_compare_and_set_lose_no_move(self, catalog: Catalog) -> None:
        names = [str(i) for i in range(24)]
        add(catalog, *map(manifest_row, names))

        def move(name: str) -> None:
            with catalog.transaction(reason=name) as tx:
                point(tx, MAIN, name)

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(move, names))
        moves = catalog.moves(MAIN)
        assert {move.new for move in moves} == {named(name) for name in names}
        assert [move.old for move in moves] == [*(move.new for move in moves[1:]), None]

    # Prefixes

    def test_the_longest_prefix_ends_where_every_group_has_a_row(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="index") as tx:
            tx.add_prefixes(prefix_row(f"key {i}", index=i, chunk=f"full {i}") for i in range(4))
            tx.add_prefixes([prefix_row("key 1", group="boundary", index=1, chunk="boundary")])
        keys = [named(f"key {i}") for i in range(6)]
        match = catalog.longest_prefix(keys, EXECUTION, ["full"])
        assert (match.num_chunks, [row.index for row in match.rows]) == (4, [0, 1, 2, 3])
        match = catalog.longest_prefix(keys, EXECUTION, ["full", "boundary"])
        assert match.num_chunks == 2
        assert [(row.index, row.group) for row in match.rows] == [(0, "full"), (1, "boundary"), (1, "full")]
        assert match.rows[1].chunk_id == named("boundary")
        assert catalog.longest_prefix(keys, named("other execution"), ["full"]).num_chunks == 0
        assert catalog.longest_prefix(keys, EXECUTION, ["absent", "full"]).rows == ()
        assert catalog.longest_prefix([], EXECUTION, ["full"]).num_chunks == 0
        assert catalog.longest_prefix(keys, EXECUTION, ["full"], as_of=0).num_chunks == 0

    def test_a_hole_below_the_end_does_not_shorten_the_prefix(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="index") as tx:
            tx.add_prefixes(prefix_row(f"key {i}", index=i) for i in (0, 2))
        match = catalog.longest_prefix([named(f"key {i}") for i in range(3)], EXECUTION, ["full"])
        assert (match.num_chunks, [row.index for row in match.rows]) == (3, [0, 2])

    def test_a_very_long_prefix_is_found(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="index") as tx:
            tx.add_prefixes(prefix_row(f"key {i}", index=i) for i in range(4_096))
        keys = [named(f"key {i}") for i in range(4_096)]
        match = catalog.longest_prefix(keys, EXECUTION, ["full"])
        assert [row.key for row in match.rows] == keys

    def test_a_live_prefix_keeps_its_chunk_and_a_removed_one_can_be_indexed_again(self, catalog: Catalog) -> None:
        def chunk_now(as_of: int | None = None) -> ObjectId:
            return catalog.longest_prefix([named("key")], EXECUTION, ["full"], as_of).rows[0].chunk_id

        with catalog.transaction(reason="index") as tx:
            tx.add_prefixes([prefix_row("key", chunk="first"), prefix_row("key", chunk="second")])
        assert chunk_now() == named("first")
        with catalog.transaction(reason="lost") as tx:
            tx.remove_chunks([named("first")])
            tx.add_prefixes([prefix_row("key", chunk="second")])
        assert chunk_now() == named("second")
        assert chunk_now(as_of=1) == named("first")

    # Collection

    def test_removing_manifests_ends_the_prefixes_of_their_doomed_chunks_only(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a", chunks=("shared", "own")), manifest_row("b", chunks=("other",)))
        with catalog.transaction(reason="index") as tx:
            tx.add_prefixes(prefix_row(name, chunk=name) for name in ("shared", "own", "other"))
        with catalog.transaction(reason="gc") as tx:
            tx.doom([chunk_ref("own"), chunk_ref("other")])
            tx.doom([ObjectRef(kind=ObjectKind.MANIFEST, object_id=named("shared"))])
            tx.remove_manifests([named("a")])

        def is_indexed(name: str) -> bool:
            return catalog.longest_prefix([named(name)], EXECUTION, ["full"]).num_chunks == 1

        assert [is_indexed(name) for name in ("shared", "own", "other")] == [True, False, True]

    def test_a_doomed_object_stays_a_tombstone_until_it_is_rescued(self, catalog: Catalog) -> None:
        one, two, three = map(chunk_ref, ("one", "two", "three"))
        with catalog.transaction(reason="gc") as tx:
            tx.doom([one, two])
        with catalog.transaction(reason="delete bytes") as tx:
            assert tx.pending_among([one, two, three]) == {one, two}
            tx.mark_deleted([one])
        assert [row.object for row in catalog.doomed()] == [two]
        assert [(row.object, row.deleted_tx) for row in catalog.doomed(pending_only=False)] == sorted(
            [(one, 2), (two, None)], key=lambda pair: pair[0].object_id
        )
        assert len(catalog.doomed(pending_only=False, limit=1)) == 1
        with catalog.transaction(reason="publish") as tx:
            assert tx.doomed_among([one, two, three]) == {one, two}
            assert tx.pending_among([one, two, three]) == {two}
            tx.rescue([one, two, three])
        assert catalog.doomed(pending_only=False) == []

    def test_an_object_that_came_back_can_be_doomed_again(self, catalog: Catalog) -> None:
        for _ in range(2):
            with catalog.transaction(reason="gc") as tx:
                tx.doom([chunk_ref("one")])
                assert tx.pending_among([chunk_ref("one")]) == {chunk_ref("one")}
                tx.mark_deleted([chunk_ref("one")])

    def test_a_tombstone_belongs_to_one_kind_of_object(self, catalog: Catalog) -> None:
        manifest = ObjectRef(kind=ObjectKind.MANIFEST, object_id=named("one"))
        with catalog.transaction(reason="gc") as tx:
            tx.doom([manifest])
            assert tx.doomed_among([chunk_ref("one"), manifest]) == {manifest}
            tx.rescue([chunk_ref("one")])
            assert tx.doomed_among([manifest]) == {manifest}

    def test_roots_are_refs_young_moves_and_running_leases(self, catalog: Catalog) -> None:
        add(catalog, *map(manifest_row, ("old", "now", "leased", "let go", "loose")))
        for name in ("old", "now"):
            with catalog.transaction(reason=name) as tx:
                point(tx, MAIN, name)
                moved_us = tx.at_us
        with catalog.transaction(reason="init") as tx:
            tx.set_ref("HEAD", symbolic=MAIN, move=move_row(tx, "HEAD", f"ref:{MAIN}"))
        catalog.acquire_lease(named("leased"), "reader", 60)
        catalog.acquire_lease(named("let go"), "reader", -1)
        assert catalog.roots(moved_us + 60_000_000) == {named("now"), named("leased")}
        assert catalog.roots(0) == {named("old"), named("now"), named("leased")}

    def test_a_lease_ends_by_the_clock_of_the_database(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"))
        lease_id = catalog.acquire_lease(named("a"), "reader", 60)
        catalog.renew_lease(lease_id, 0.005)
        time.sleep(0.02)
        with pytest.raises(NotFound) as caught:
            catalog.renew_lease(lease_id, 60)
        assert caught.value.code == "not_found.lease"
        assert catalog.roots(0) == set()

    def test_a_released_lease_keeps_nothing(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"))
        lease_id = catalog.acquire_lease(named("a"), "reader", 60)
        assert catalog.roots(0) == {named("a")}
        catalog.release_lease(lease_id)
        catalog.release_lease(lease_id)
        assert catalog.roots(0) == set()

    def test_a_manifest_that_is_gone_cannot_be_leased(self, catalog: Catalog) -> None:
        with pytest.raises(NotFound):
            catalog.acquire_lease(named("a"), "reader", 60)

    def test_leases_stay_outside_the_history(self, catalog: Catalog) -> None:
        number = add(catalog, manifest_row("a"))
        catalog.release_lease(catalog.acquire_lease(named("a"), "reader", 60))
        assert catalog.current_tx() == number

    def test_counts_count_what_is_live(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a", chunks=("one", "three")), manifest_row("b", chunks=("three",)))
        with catalog.transaction(reason="more") as tx:
            point(tx, MAIN, "a")
            tx.add_prefixes([prefix_row("key", chunk="one")])
            tx.doom([chunk_ref("gone")])
        counts = catalog.counts()
        assert (counts.num_manifests, counts.num_chunks, counts.chunk_bytes) == (2, 2, len("one" + "three"))
        assert (counts.num_prefixes, counts.num_refs, counts.num_moves) == (1, 1, 1)
        assert (counts.num_pending_deletions, counts.num_transactions) == (1, 2)
        assert catalog.counts(as_of=1).num_refs == 0

    # Purge

    def test_a_purge_forgets_the_manifest_in_every_transaction_and_leaves_a_mark(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a", chunks=("shared",)), manifest_row("b", parents=("a",), chunks=("own", "shared")))
        with catalog.transaction(reason="index") as tx:
            tx.add_prefixes([prefix_row("own", chunk="own"), prefix_row("shared", chunk="shared")])
        doomed = catalog.purge(named("b"), reason="asked to")
        assert doomed == {chunk_ref("own"), ObjectRef(kind=ObjectKind.MANIFEST, object_id=named("b"))}
        assert {row.object for row in catalog.doomed()} == doomed
        assert [catalog.find_manifest(named("b"), as_of=tx) for tx in (1, 2, 3)] == [None, None, None]
        assert [catalog.counts(as_of=tx).num_chunks for tx in (1, 2, 3)] == [1, 1, 1]
        assert catalog.longest_prefix([named("own")], EXECUTION, ["full"]).num_chunks == 0
        assert catalog.longest_prefix([named("shared")], EXECUTION, ["full"]).num_chunks == 1
        assert [(mark.manifest_id, mark.reason) for mark in catalog.purges()] == [(named("b"), "asked to")]

    def test_a_manifest_in_use_is_not_purged(self, catalog: Catalog) -> None:
        add(catalog, manifest_row("a"), manifest_row("b", parents=("a",)))
        with catalog.transaction(reason="branch") as tx:
            point(tx, MAIN, "b")
        for name in ("a", "b"):
            with pytest.raises(Conflict) as caught:
                catalog.purge(named(name), reason="asked to")
            assert caught.value.code == "conflict.manifest_in_use"
        assert catalog.current_tx() == 2
        with pytest.raises(NotFound):
            catalog.purge(named("absent"), reason="asked to")

    # Ledger

    def test_decisions_are_kept_with_their_reason(self, catalog: Catalog) -> None:
        for subject in ("request 1", "request 2"):
            with catalog.transaction(reason="decide") as tx:
                tx.add_decision(subject=subject, kind="plan", chosen="restore", reason="cheaper", detail='{"ms": 3}')
        (found,) = catalog.decisions("request 2")
        assert (found.tx, found.kind, found.chosen, found.reason) == (2, "plan", "restore", "cheaper")
        assert found.detail == '{"ms": 3}'
        assert [row.subject for row in catalog.decisions()] == ["request 2", "request 1"]
        assert [row.subject for row in catalog.decisions(as_of=1)] == ["request 1"]

    def test_demand_is_listed_until_it_is_fulfilled(self, catalog: Catalog) -> None:
        with catalog.transaction(reason="want") as tx:
            first = tx.add_demand(kind=DemandKind.MANIFEST, subject=named("a"), worker="w")
            tx.add_demand(kind=DemandKind.PREFIX, subject=named("key"), worker="w")
        with catalog.transaction(reason="met") as tx:
            tx.fulfil_demand(first)
        (left,) = catalog.demands()
        assert (left.kind, left.subject, left.worker) == (DemandKind.PREFIX, named("key"), "w")
