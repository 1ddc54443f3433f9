"""From what a caller asks of ``TransformersEngine.load`` to a runtime: options checked, parameters digested, context bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import transformers

from forkpoint.errors import InvalidInput
from forkpoint.ids import ObjectId
from forkpoint.llm.engines.inspection import context_limit
from forkpoint.llm.engines.runtime import TransformersRuntime
from forkpoint.llm.engines.selftest import FindingsCache
from forkpoint.llm.engines.sources import LoadedModel, Note
from forkpoint.llm.engines.weights import DigestCache, digest_parameters, file_identity
from forkpoint.llm.resident.pages import PageSize
from forkpoint.llm.resident.residency import Residency

_MAX_THREADS: Final = 1024
"""More than any machine has; far above it torch ends the process."""


def make_runtime(
    loaded: LoadedModel, parameters: ObjectId, max_context: int | None, residency: Residency, known: FindingsCache
) -> TransformersRuntime:
    """A runtime of a loaded model whose parameters have this digest.

    Raises:
        InvalidInput: ``invalid_input.max_context`` for a context that the model does not take.
    """
    limit = context_limit(loaded.model)
    if max_context is not None and (type(max_context) is not int or not 2 <= max_context <= limit):
        raise InvalidInput(
            f"max_context is {max_context}; this model takes 2 to {limit}", code="max_context", have=str(max_context)
        )
    return TransformersRuntime(
        loaded, parameters=parameters, max_context=max_context or limit, known=known, residency=residency
    )


def page_size(cache: str, page_tokens: int) -> PageSize:
    """What ``cache`` and ``page_tokens`` mean together. Raises InvalidInput ``invalid_input.cache``."""
    if cache not in ("paged", "contiguous"):
        raise InvalidInput(f"cache is {cache!r}; use 'paged' or 'contiguous'", code="cache", cache=str(cache))
    return "contiguous" if cache == "contiguous" else page_tokens


def parameters_digest(loaded: LoadedModel, dtype: str, cache: Path, note: Note) -> ObjectId:
    """Digest of the parameters as loaded: from the cache where the same files were hashed before."""
    digests = DigestCache(cache / "digests")
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    key = file_identity(loaded.files, dtype, type(loaded.model).__name__, libraries) if loaded.files else None
    found = digests.find(key) if key is not None else None
    if found is not None:
        return found
    note("hashing the parameters")
    digest = digest_parameters(loaded.model)
    if key is not None:
        digests.put(key, digest)
    return digest


def set_threads(threads: int) -> None:
    """Set torch's threads for this process. Raises InvalidInput ``invalid_input.threads``."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MAX_THREADS:
        raise InvalidInput(f"threads is {threads}; give 1 to {_MAX_THREADS}", code="threads", threads=str(threads))
    torch.set_num_threads(threads)
