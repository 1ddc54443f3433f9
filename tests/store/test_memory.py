"""The memory store keeps the contract."""

from __future__ import annotations

import pytest
from tests.store.damage import damage_in

from forkpoint.store.memory import MemoryStore
from forkpoint.testing.store_contract import Damage, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def damage(self, store: MemoryStore) -> Damage:
        return damage_in(store)
