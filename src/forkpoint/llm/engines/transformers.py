"""``TransformersEngine``: the handle through which people load a model and open continuations of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, final

from torch import Tensor

from forkpoint.config import Config
from forkpoint.errors import Conflict, InvalidInput
from forkpoint.ids import Bytes
from forkpoint.llm import opening
from forkpoint.llm.continuation import Continuation, generate_together
from forkpoint.llm.engines.attention import ATTENTION
from forkpoint.llm.engines.base import Exactness, PrefillProgress, no_progress
from forkpoint.llm.engines.doctor import EngineReport, describe
from forkpoint.llm.engines.loading import make_runtime, page_size, parameters_digest, set_threads
from forkpoint.llm.engines.runtime import TransformersRuntime
from forkpoint.llm.engines.selftest import FindingsCache
from forkpoint.llm.engines.sources import BUNDLED, LoadedModel, Note, load_model
from forkpoint.llm.engines.weights import digest_parameters, replace_parameters
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.llm.resident.pages import DEFAULT_PAGE_TOKENS
from forkpoint.llm.resident.plan import DEFAULT_LANES, PlanPolicy
from forkpoint.llm.resident.residency import Residency
from forkpoint.llm.sampling import Sampling
from forkpoint.llm.session import DecodeSession
from forkpoint.llm.turns import Message
from forkpoint.repo.repository import Repository
from forkpoint.state.fingerprint import Fingerprint


@final
class TransformersEngine:
    """A loaded model. Closing the handle ends only the handle: continuations and sessions keep the model alive.

    Use from several threads is safe; forward passes take turns.
    """

    def __init__(self, runtime: TransformersRuntime, loaded: LoadedModel, known: FindingsCache) -> None:
        self._runtime: TransformersRuntime | None = runtime
        self._known = known
        self._loaded: LoadedModel | None = loaded

    @classmethod
    def load(
        cls,
        source: str = BUNDLED,
        *,
        dtype: str = "bfloat16",
        threads: int | None = None,
        max_context: int | None = None,
        cache: Literal["paged", "contiguous"] = "paged",
        page_tokens: int = DEFAULT_PAGE_TOKENS,
        pool_bytes: int | None = None,
        lanes: int = DEFAULT_LANES,
        plan: PlanPolicy = "once",
        native: bool = True,
        trust_remote_code: bool = False,
        cache_dir: Path | None = None,
        note: Note = lambda text: None,
    ) -> TransformersEngine:
        """Load a model for inference.

        Args:
            source: ``bundled:smollm2``, a folder with safetensors, a ``.gguf`` file, or a hub id.
            dtype: float32, bfloat16 or float16.
            threads: torch's threads for this process; None leaves them.
            max_context: tokens of a continuation at most; None is the model's own limit.
            cache: ``paged``, or ``contiguous``: one page of the maximum length for each line of descent.
            page_tokens: tokens of a page: 16, 32, 64, 128 or 256.
            pool_bytes: memory for pages; None is a quarter of what is free, and at least one context. It is taken as it is needed.
            lanes: continuations that one decode step serves at most.
            plan: ``once``; ``replan`` builds the decode plan anew for every pass, for comparison.
            native: run the model as one native program where it can be; else, and where it cannot, through transformers.
            trust_remote_code: run Python code that ships with the model. Off unless asked for.
            cache_dir: for dequantised models and digests; None is the configured one.
            note: told what long work is going on.

        Raises:
            NotFound, InvalidInput, Unavailable: as ``load_model``.
            Incompatible: ``incompatible.architecture`` for a model with state of a kind that cannot be kept exactly.
        """
        if threads is not None:
            set_threads(threads)
        residency = Residency(
            page_size=page_size(cache, page_tokens), pool_bytes=pool_bytes, lanes=lanes, plan=plan, native=native
        )
        folder = cache_dir or Config.from_environment().cache_dir
        loaded = load_model(
            source, dtype=dtype, cache=folder, trust_remote_code=trust_remote_code, attention=ATTENTION, note=note
        )
        digest = parameters_digest(loaded, dtype, folder, note)
        note("preparing the model")
        known = FindingsCache(folder / "selftests")
        return cls(make_runtime(loaded, digest, max_context, residency, known), loaded, known)

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what it is ----

    @property
    def name(self) -> str:
        """The source it was loaded from."""
        return self._open().name

    @property
    def fingerprint(self) -> Fingerprint:
        """State and execution identity."""
        return self._open().fingerprint

    @property
    def exactness(self) -> Exactness:
        """Which claims hold here, and why."""
        return self._open().exactness

    @property
    def max_context(self) -> int:
        """Tokens of a continuation at most."""
        return self._open().max_context

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return self._open().vocabulary

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self._open().codec.end_tokens

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The state groups of the model."""
        return self._open().groups

    def stats(self) -> dict[str, int]:
        """What is resident and what was served.

        ``state_bytes`` and ``lineages`` (0 when no continuation is alive), pages in all, free, held, evictable and evicted, chunks evicted
        and brought back so far, and how often the decode plan was built and served a pass.
        """
        runtime = self._open()
        return {
            **runtime.strategy.stats(),
            "state_bytes": runtime.strategy.num_resident_bytes(),
            "plans_built": runtime.plan.num_built,
            "passes_served": runtime.plan.num_served,
            "rows_served": runtime.plan.num_rows,
        }

    def report(self) -> EngineReport:
        """What runs this model, which claims hold and why: what ``forkpoint doctor`` prints."""
        return describe(self._open())

    def encode(self, text: str) -> list[int]:
        """Token ids of this string alone, without special tokens."""
        return self._open().codec.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""
        return self._open().codec.decode(tokens)

    # ---- opening continuations ----

    def start(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        repository: Repository | None = None,
        progress: PrefillProgress = no_progress,
    ) -> Continuation:
        """A new continuation; all tokens but the last are processed, the last is pending.

        Args:
            prompt: text (with the tokenizer's own beginning tokens, if it has any) or token ids; at least one token.
            sampling: parameters, seed and stream with which it will go on.
            repository: where to look for the longest stored prefix of the same model, to restore instead of computing.
            progress: called with (tokens done, tokens to compute).
        """
        runtime = self._open()
        tokens = runtime.codec.encode_start(prompt) if isinstance(prompt, str) else list(prompt)
        return opening.start(runtime, tokens, sampling=sampling, repository=repository, progress=progress)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        repository: Repository | None = None,
        progress: PrefillProgress = no_progress,
    ) -> Continuation:
        """A conversation, rendered by the model's chat template up to where the model is to answer."""
        runtime = self._open()
        tokens = runtime.codec.render_chat([dict(message) for message in messages])
        return opening.start(
            runtime, tokens, sampling=sampling, repository=repository, progress=progress, messages=tuple(messages)
        )

    def checkout(
        self,
        repository: Repository,
        name: str,
        *,
        allow_execution_difference: bool = False,
        progress: PrefillProgress = no_progress,
    ) -> Continuation:
        """Restore a committed continuation by name; it goes on exactly where it stood. Every chunk is verified.

        Args:
            repository: where it is.
            name: branch, tag, ``main~2``, ``main@{1}``, id or unique id prefix.
            allow_execution_difference: restore the same bytes although other kernels would go on with other bits; the
                receipt says so.
            progress: called with (chunks done, chunks in all).

        Raises:
            NotFound: no such name. Corrupt: a chunk is damaged. Incompatible: another model; the field that differs is
                named. Nothing changes in memory then.
        """
        return opening.checkout(
            self._open(), repository, name, allow_execution_difference=allow_execution_difference, progress=progress
        )

    def restore(
        self, snapshot: Bytes, *, allow_execution_difference: bool = False, progress: PrefillProgress = no_progress
    ) -> Continuation:
        """Open the bytes of a ``Continuation.snapshot``, made by this or another process on the same model."""
        return opening.restore(
            self._open(), snapshot, allow_execution_difference=allow_execution_difference, progress=progress
        )

    def generate_many(
        self,
        values: Sequence[Continuation],
        max_tokens: int = 128,
        *,
        sampling: Sampling | None = None,
        top_logprobs: int = 0,
    ) -> list[Continuation]:
        """Generate from several continuations of this engine in shared steps, each as it would have been alone.

        Args:
            sampling: for all of them; None leaves each its own.

        Raises:
            InvalidInput: ``invalid_input.engine`` when one of them is of another engine.
        """
        runtime = self._open()
        if any(not value.belongs_to(runtime) for value in values):
            raise InvalidInput("a continuation of another engine is among these; generate with its own", code="engine")
        return generate_together(values, max_tokens, sampling=sampling, top_logprobs=top_logprobs)

    def decode_session(self) -> DecodeSession:
        """An empty session, to be driven token by token."""
        return DecodeSession(self._open())

    # ---- changing and ending ----

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace parameters by name, in place; the engine is then another model with another fingerprint.

        Raises:
            Conflict: ``conflict.weights`` while continuations or sessions of this model are alive.
            InvalidInput: ``invalid_input.parameters`` for an unknown name, or another shape.
        """
        runtime, loaded = self._open(), self._loaded
        assert loaded is not None
        with runtime.between_passes():
            alive = runtime.strategy.num_lineages()
            if alive:
                raise Conflict(
                    f"{alive} lineages of continuations of this model are alive; let go of them before changing its weights",
                    code="weights",
                    alive=alive,
                )
            replace_parameters(loaded.model, parameters)
        self._runtime = make_runtime(
            loaded, digest_parameters(loaded.model), runtime.max_context, runtime.residency, self._known
        )

    def close(self) -> None:
        """End the handle; idempotent. Memory goes when the last continuation does."""
        self._runtime = None
        self._loaded = None

    # ---- inside ----

    def _open(self) -> TransformersRuntime:
        if self._runtime is None:
            raise InvalidInput("this engine is closed; load the model again", code="closed")
        return self._runtime
