"""The SQLite catalog keeps the contract of every catalog."""

from __future__ import annotations

from pathlib import Path

from forkpoint.catalog.catalog import Catalog
from forkpoint.catalog.dialect import sqlite_url
from forkpoint.testing.catalog_contract import CatalogContract


class TestSqliteCatalog(CatalogContract):
    def create(self, folder: Path) -> Catalog:
        return Catalog.create(sqlite_url(folder / "catalog.sqlite"))
