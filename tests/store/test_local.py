"""The local store keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkpoint.ids import ObjectId, ObjectKind
from forkpoint.store.layout import Layout
from forkpoint.store.local import LocalStore
from forkpoint.testing.store_contract import Damage, StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "objects")

    @pytest.fixture
    def damage(self, store: LocalStore) -> Damage:
        def write(kind: ObjectKind, object_id: ObjectId, data: bytes) -> None:
            Layout(store.root).path_of(kind, object_id).write_bytes(data)

        return write
