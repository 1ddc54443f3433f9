"""A mutable cursor over continuations' state, for callers who drive a model token by token.

A session owns incremental state only: no sampling, no text, no rollover. It keeps its model alive after the engine is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import final

from forkpoint.errors import InvalidInput
from forkpoint.ids import Bytes
from forkpoint.llm.boundary import Boundary
from forkpoint.llm.capture import capture
from forkpoint.llm.continuation import Continuation
from forkpoint.llm.engines.base import Logits, Runtime
from forkpoint.llm.generation import Cursor
from forkpoint.llm.history import History
from forkpoint.llm.lineage import Lineage
from forkpoint.llm.receipt import Receipt
from forkpoint.llm.resident.base import State
from forkpoint.llm.restoration import check_fits, restore_groups
from forkpoint.llm.sampling import Sampling
from forkpoint.llm.snapshot import fetch_from, open_snapshot, snapshot_parts, snapshot_size
from forkpoint.state.draft import Draft


@final
class DecodeSession:
    """``step`` appends exactly one token and returns the logits that predict the next. Not safe for use from two threads at once."""

    def __init__(
        self, runtime: Runtime, state: State | None = None, tokens: Sequence[int] = (), *, is_trusted: bool = True
    ) -> None:
        self._runtime: Runtime | None = runtime
        self._state: State | None = state if state is not None else runtime.strategy.empty()
        self._tokens = History(tokens)
        self._is_trusted = is_trusted

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Processed tokens."""
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The processed tokens."""
        return tuple(self._tokens)

    @property
    def capacity(self) -> int:
        """Tokens that fit in all."""
        return self._open().max_context

    @property
    def cache_kind(self) -> str:
        """How state lies in memory: ``paged`` or ``contiguous``."""
        return self._open().strategy.kind

    @property
    def page_size(self) -> int:
        """Tokens of a page; the contiguous strategy has one page of maximum length."""
        return self._open().strategy.page_size

    def step(self, token: int) -> Logits:
        """Process one token; float32 ``[vocabulary]`` logits. A failure in any layer leaves ``size`` as it was.

        Raises:
            CapacityExceeded: ``capacity.context`` when the session is full; ``reset`` or fork a shorter one.
            InvalidInput: ``invalid_input.token``, or ``invalid_input.closed``.
        """
        self._state, logits = self._open().step(self._live_state(), token)
        self._tokens = self._tokens.append(token)
        return logits

    def reset(self) -> None:
        """Forget everything; the memory is freed unless a fork still uses it."""
        self._state, self._tokens, self._is_trusted = self._open().strategy.empty(), History(()), True

    def fork(self) -> DecodeSession:
        """A second session at the same point; nothing is copied until both go on."""
        return DecodeSession(self._open(), self._live_state(), self._tokens, is_trusted=self._is_trusted)

    def continuation(self, pending: int, *, sampling: Sampling | None = None) -> Continuation:
        """The continuation that evaluates ``pending`` next."""
        runtime = self._open()
        runtime.check_tokens((pending,))
        tokens = History([*self._tokens, pending])
        receipt = Receipt(operation="start", claim=runtime.exactness.claim, tokens_reused=self.size)
        cursor = Cursor(state=self._live_state(), tokens=tokens, prompt_length=len(tokens), offset=0)
        return Continuation(
            runtime,
            cursor,
            sampling=sampling or Sampling(),
            receipt=receipt,
            lineage=Lineage(),
            is_trusted=self._is_trusted,
        )

    def snapshot(self) -> bytes:
        """The session as one byte string (a bundle without a pending token); an empty session gives a valid one."""
        self._open().check_weights()
        return b"".join(snapshot_parts(self._draft()))

    def snapshot_size(self) -> int:
        """Size of :meth:`snapshot` in bytes."""
        return snapshot_size(self._draft())

    def restore(self, data: Bytes) -> None:
        """Go to a snapshot, of this or another process. On any error the session stays where it was.

        Of a continuation's snapshot the processed tokens are taken; its pending token is the caller's next ``step``.

        Raises:
            Corrupt: torn or flipped bytes. Incompatible: another model; the field that differs is named.
        """
        runtime = self._open()
        manifest, bundle = open_snapshot(data)
        check_fits(runtime, manifest, allow_execution_difference=False)
        boundary = Boundary.from_record(manifest.boundary)
        restored = restore_groups(
            runtime, manifest.groups, boundary.position, fetch_from(bundle), prefilled=boundary.prefilled
        )
        self._state, self._tokens, self._is_trusted = restored.state, History(restored.tokens), False

    def close(self) -> None:
        """Let go of the model and the memory; closing twice is fine."""
        self._runtime, self._state = None, None

    def _open(self) -> Runtime:
        if self._runtime is None:
            raise InvalidInput("this session is closed; open another from the engine", code="closed")
        return self._runtime

    def _live_state(self) -> State:
        assert self._state is not None
        return self._state

    def _draft(self) -> Draft:
        runtime, state = self._open(), self._live_state()
        boundary = Boundary(
            position=self.size,
            pending=None,
            prompt_length=self.size,
            offset=0,
            sampling=Sampling(),
            prefilled=state.prefilled,
        )
        return capture(
            runtime,
            state,
            self._tokens,
            boundary,
            parents=(),
            payload={},
            is_trusted=self._is_trusted,
        )
