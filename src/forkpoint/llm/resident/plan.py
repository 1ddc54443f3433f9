"""The decode plan: what serves every pass of a model, built once and reused; only token ids, positions and page tables change.

It says whether it may serve a step, with a typed reason where it may not, and counts how often it was built and how many passes it served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import Corrupt, InvalidInput
from forkpoint.llm.resident.program import Program
from forkpoint.llm.resident.routes import Step
from forkpoint.llm.resident.tracing import Refusal

PlanPolicy = Literal["once", "replan"]
"""``replan`` builds the plan anew for every pass: for comparison only."""

DEFAULT_LANES: Final = 8
MAX_ROWS: Final = 256

Logits = NDArray[np.float32]


class Executor(Protocol):
    """Runs passes over the pages it is bound to."""

    name: str

    def run(self, step: Step, output_rows: NDArray[np.int64], *, threads: int) -> Logits:
        """Append all rows' keys and values; the logits of ``output_rows``."""
        ...

    def rebind(self, pages: Sequence[Tensor]) -> Refusal | None:
        """Use other pages from now on, or say why not; a refusal changes nothing."""
        ...


@final
class ProgramExecutor:
    """The model as one native call."""

    name = "program"

    def __init__(self, program: Program) -> None:
        self._program = program

    def run(self, step: Step, output_rows: NDArray[np.int64], *, threads: int) -> Logits:
        """See ``Executor``."""
        return self._program.run(step.token_ids, step.positions, step.routes, step.tables, output_rows, threads=threads)

    def rebind(self, pages: Sequence[Tensor]) -> Refusal | None:
        """See ``Executor``."""
        return self._program.rebind(pages)


@final
class DecodePlan:
    """Passes of at most ``max_rows`` rows over one model's pages. One pass at a time.

    Attributes:
        lanes: continuations that a loop should decode in one step.
        refusal: why the model runs through transformers instead of a native program; None where it does not.
        num_built: how often an executor was built.
        num_served, num_rows: passes served, and rows in them, padding included.
    """

    def __init__(
        self,
        build: Callable[[Sequence[Tensor]], tuple[Executor, Refusal | None]],
        pages: Sequence[Tensor],
        *,
        lanes: int = DEFAULT_LANES,
        max_rows: int = MAX_ROWS,
        policy: PlanPolicy = "once",
    ) -> None:
        if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= max_rows:
            raise InvalidInput(f"lanes is {lanes!r}; give 1 to {max_rows}", code="lanes", lanes=str(lanes))
        if policy not in ("once", "replan"):
            raise InvalidInput(f"plan is {policy!r}; use 'once' or 'replan'", code="plan", plan=str(policy))
        self.lanes = lanes
        self.max_rows = max_rows
        self._build = build
        self._pages = tuple(pages)
        self._policy = policy
        self.num_built = 0
        self.num_served = 0
        self.num_rows = 0
        self._executor: Executor
        self.refusal: Refusal | None
        self._rebuild()

    @property
    def executor(self) -> str:
        """``program`` or ``transformers``."""
        return self._executor.name

    def find_refusal(self, step: Step, pages: Sequence[Tensor]) -> Refusal | None:
        """Why a step over these pages cannot be served as things are, or None. ``pages`` can be mended by ``rebind``."""
        if step.num_rows > self.max_rows:
            return _refusal("capacity", f"{step.num_rows} rows where the plan was built for {self.max_rows}")
        if any(mine.data_ptr() != given.data_ptr() for mine, given in zip(self._pages, pages, strict=True)):
            return _refusal("pages", "the pages lie elsewhere than those the plan is bound to")
        return None

    def run(self, step: Step, output_rows: NDArray[np.int64], *, threads: int) -> Logits:
        """Serve a step that ``find_refusal`` has nothing against.

        Raises:
            Corrupt: ``corrupt.logits`` when a logit is not a number: the pass must not be kept.
        """
        if self._policy == "replan" and self.num_served:
            self._rebuild()
        self.num_served += 1
        self.num_rows += step.num_rows
        logits = self._executor.run(step, output_rows, threads=threads)
        # A sum is much faster than a look at each; infinities of both signs give no number too, hence the second look.
        with np.errstate(invalid="ignore", over="ignore"):
            is_suspect = bool(np.isnan(logits.sum()))
        if is_suspect and np.isnan(logits).any():
            raise Corrupt("the model gave logits that are not numbers; check its weights and its dtype", code="logits")
        return logits

    def rebind(self, pages: Sequence[Tensor]) -> Refusal | None:
        """Serve from another allocation of pages from now on, or say why not; a refusal changes nothing."""
        refusal = self._executor.rebind(pages)
        if refusal is None:
            self._pages = tuple(pages)
        return refusal

    def _rebuild(self) -> None:
        self._executor, self.refusal = self._build(self._pages)
        self.num_built += 1


def _refusal(code: str, why: str) -> Refusal:
    return Refusal(code=code, operation="", why=why)
