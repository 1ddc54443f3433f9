"""How continuations live in memory and are served: what a caller may choose of it."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.errors import InvalidInput
from forkpoint.llm.resident.pages import DEFAULT_PAGE_TOKENS, PageSize
from forkpoint.llm.resident.plan import DEFAULT_LANES, PlanPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How continuations live in memory and are served.

    Attributes:
        page_size: tokens of a page, or ``contiguous``: one page of the maximum length.
        pool_bytes: memory for pages; None is a share of what is free.
        lanes: continuations that one decode step serves at most.
        plan: ``once``, or ``replan`` to build the plan anew for every pass, for comparison.
        native: whether the model may run as a native program; else it runs through transformers.

    Raises:
        InvalidInput: ``invalid_input.native`` for what is neither True nor False.
    """

    page_size: PageSize = DEFAULT_PAGE_TOKENS
    pool_bytes: int | None = None
    lanes: int = DEFAULT_LANES
    plan: PlanPolicy = "once"
    native: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.native, bool):
            raise InvalidInput(f"native is {self.native!r}; use True or False", code="native", native=str(self.native))
