"""Which stored moves were really made, and which manifests they vouch for. Pure; used when a catalog is rebuilt.

Refs. The moves of one ref form a chain through ``previous``. Where several moves follow the same one, at most one of them was
committed: the one that has successors, else the one with the greatest (tx, time, id). A move whose previous one was lost begins
another chain; chains follow each other by the same order. The last move of the last chain says where the ref is.

Trust. A manifest is trusted when a trusted move names it as ``new``, or when a trusted manifest continues it and no untrusted move
names it: trust is hereditary, so whoever published the trusted child knew its parent to be trusted, or did not know it. A manifest
that only untrusted moves name came from outside; it is not trusted and passes no trust on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from forkpoint.ids import ManifestId, MoveId
from forkpoint.repo.rows import CONTINUES
from forkpoint.state.manifest import Manifest
from forkpoint.state.move import Move

Named = tuple[MoveId, Move]


def committed_moves(moves: Mapping[MoveId, Move]) -> list[Named]:
    """The moves that were made, of all refs, oldest first."""
    by_ref: defaultdict[str, dict[MoveId, Move]] = defaultdict(dict)
    for move_id, move in moves.items():
        by_ref[move.ref][move_id] = move
    timed = [timed for each in by_ref.values() for timed in _timed(_history(each))]
    return [named for _, named in sorted(timed, key=lambda item: item[0])]


def trusted_manifests(manifests: Mapping[ManifestId, Manifest], moves: Iterable[Move]) -> frozenset[ManifestId]:
    """Those of ``manifests`` whose state was computed or verified here."""
    named: dict[bool, set[str]] = {True: set(), False: set()}
    for move in moves:
        if move.new is not None:
            named[move.is_trusted].add(move.new)
    trusted: set[ManifestId] = set()
    waiting = [ManifestId(each) for each in named[True]]
    while waiting:
        manifest_id = waiting.pop()
        manifest = manifests.get(manifest_id)
        is_foreign = manifest_id in named[False] and manifest_id not in named[True]
        if manifest is None or is_foreign or manifest_id in trusted:
            continue
        trusted.add(manifest_id)
        waiting += [parent.manifest_id for parent in manifest.parents if parent.role == CONTINUES]
    return frozenset(trusted)


def _history(moves: Mapping[MoveId, Move]) -> list[Named]:
    """The committed moves of one ref in order."""
    followers: defaultdict[MoveId | None, list[Named]] = defaultdict(list)
    for move_id, move in moves.items():
        followers[move.previous].append((move_id, move))
    starts = [previous for previous in followers if previous is None or previous not in moves]
    chains = sorted((_chain(start, followers) for start in starts), key=lambda chain: _when(chain[-1]))
    return [named for chain in chains for named in chain]


def _timed(history: Sequence[Named]) -> list[tuple[tuple[int, int, MoveId], Named]]:
    """Each move with the latest time up to it: so sorting keeps the order of a chain, whatever clocks said."""
    return list(zip(accumulate(map(_when, history), max), history, strict=True))


def _chain(start: MoveId | None, followers: Mapping[MoveId | None, Sequence[Named]]) -> list[Named]:
    chain: list[Named] = []
    previous = start
    while following := followers.get(previous):
        chosen = max(following, key=lambda named: (named[0] in followers, *_when(named)))
        chain.append(chosen)
        previous = chosen[0]
    return chain


def _when(named: Named) -> tuple[int, int, MoveId]:
    move_id, move = named
    return move.tx, move.at_us, move_id
