"""The prefix-key chain: a name for "these tokens, under this model, in this namespace", chunk by chunk.

``key_0 = H(domain, state identity, namespace)`` and ``key_i = H(key_{i-1}, token ids of chunk i)``. Every field is written with
its length, so no two different chains share bytes: equal suffixes under another prefix, model, adapter or namespace never alias.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from forkpoint.errors import InvalidInput
from forkpoint.ids import ObjectId, digest_bytes, digest_of

CHUNK_TOKENS: Final = 256
"""Tokens of a full chunk."""

_ROOT_DOMAIN: Final = b"forkpoint.prefix.root.1"
_LINK_DOMAIN: Final = b"forkpoint.prefix.link.1"


def root_key(state_id: ObjectId, namespace: str) -> ObjectId:
    """Key of the empty prefix. InvalidInput ``invalid_input.namespace`` for a name that is not Unicode (a lone surrogate)."""
    try:
        name = namespace.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"namespace {namespace!r} holds a lone surrogate", code="namespace") from error
    return digest_of(_fields(_ROOT_DOMAIN, digest_bytes(state_id), name))


def next_key(previous: ObjectId, tokens: Sequence[int]) -> ObjectId:
    """Key of the prefix that ends with ``tokens``, the token ids of one chunk (unsigned 32-bit)."""
    return digest_of(_fields(_LINK_DOMAIN, digest_bytes(previous), token_bytes(tokens)))


def prefix_keys(state_id: ObjectId, namespace: str, tokens: Sequence[int]) -> Iterator[ObjectId]:
    """Keys of every full chunk of ``tokens``, shortest prefix first: ``len(tokens) // 256`` of them."""
    key = root_key(state_id, namespace)
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        key = next_key(key, tokens[start : start + CHUNK_TOKENS])
        yield key


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers, the form in which a chunk carries them.

    Raises:
        InvalidInput: ``invalid_input.token`` for an id outside [0, 2**32).
    """
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise InvalidInput(f"a token id lies outside [0, 2**32): {error}", code="token") from error


def _fields(*fields: bytes) -> Iterator[bytes]:
    for field in fields:
        yield struct.pack("<Q", len(field))
        yield field
