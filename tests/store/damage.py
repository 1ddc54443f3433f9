"""Damage to a memory store, as a bad disk would do it to another."""

from __future__ import annotations

from forkpoint.ids import Bytes, ObjectId, ObjectKind
from forkpoint.store.memory import MemoryStore
from forkpoint.testing.store_contract import Damage


def damage_in(store: MemoryStore) -> Damage:
    """Lets other bytes stand where those of a present object were."""

    def damage(kind: ObjectKind, object_id: ObjectId, data: Bytes) -> None:
        assert store.has(kind, object_id)
        store._objects[kind, object_id] = bytes(data)
        store._verified.discard((kind, object_id))

    return damage
