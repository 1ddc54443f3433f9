"""Which committed values a continuation came from, and its own id once it has one.

A manifest names as parent the nearest ancestor that was committed. The choice is made once, when the id is first needed, and kept, so that
a value's id never changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from forkpoint.ids import ManifestId
from forkpoint.llm.snapshot import draft_id
from forkpoint.state.draft import Draft
from forkpoint.state.manifest import Parent


@final
class Lineage:
    """One link of the chain of values. Links without a commit of their own are passed over."""

    def __init__(
        self,
        parent: Lineage | None = None,
        *,
        committed: ManifestId | None = None,
        parents: tuple[Parent, ...] | None = None,
    ) -> None:
        """``committed`` is the id under which a repository holds the value; ``parents`` are those of a stored manifest, kept."""
        self._parent = parent
        self._committed = committed
        self._id = committed
        self._parents = parents
        self._lock = threading.Lock()

    def child(self) -> Lineage:
        """The link of a value made from this one."""
        return Lineage(self)

    def parents(self) -> tuple[Parent, ...]:
        """The nearest committed ancestor as causal parent, or nothing."""
        with self._lock:
            if self._parents is None:
                self._parents = self._nearest()
            return self._parents

    def identify(self, draft: Callable[[], Draft]) -> ManifestId:
        """The value's id, computed from its draft the first time."""
        if self._id is None:
            self._id = draft_id(draft())
        return self._id

    def mark_committed(self, manifest_id: ManifestId) -> None:
        """Note that the value was published under this id, with the parents it has now."""
        self.parents()
        self._committed = manifest_id
        self._id = manifest_id
        self._parent = None  # what came before is not asked for again

    def _nearest(self) -> tuple[Parent, ...]:
        link = self._parent
        while link is not None:
            above = (
                link._parent
            )  # read first: a commit in another thread names the link before it lets go of what is above
            if link._committed is not None:
                return (Parent(role="continues", manifest_id=link._committed),)
            if above is None:
                return link._parents or ()  # of a snapshot: its value was not committed here, what it continues was
            link = above
        return ()
