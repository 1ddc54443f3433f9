"""What every part of a repository stands on: its store, its catalog, its namespace and the name moves are recorded under."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.catalog.catalog import Catalog
from forkpoint.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Backing:
    """Borrowed, never closed here: the :class:`~forkpoint.repo.repository.Repository` owns both."""

    store: Store
    catalog: Catalog
    namespace: str
    who: str
