"""Text of tokens, by the tokenizer that a manifest's fingerprint names and the store holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forkpoint.errors import Corrupt
from forkpoint.ids import ObjectId, ObjectKind, short
from forkpoint.repo.contents import tokenizer_of
from forkpoint.state.manifest import Manifest
from forkpoint.store.base import Store


class Decoder(Protocol):
    """Turns token ids into text, special tokens included. Raises Corrupt ``corrupt.tokens`` for what cannot be one."""

    def __call__(self, tokens: Sequence[int]) -> str: ...


def find_decoder(store: Store, manifest: Manifest) -> Decoder | None:
    """The decoder of a manifest's tokens; None when it names no tokenizer, or one that was never stored.

    Raises:
        Corrupt: ``corrupt.tokenizer`` when the stored tokenizer cannot be read.
    """
    tokenizer_id = tokenizer_of(manifest)
    if tokenizer_id is None or not store.has(ObjectKind.TOKENIZER, tokenizer_id):
        return None
    return load_decoder(store, tokenizer_id)


def load_decoder(store: Store, tokenizer_id: ObjectId) -> Decoder:
    """A decoder from a stored ``tokenizer.json``. Raises NotFound or Corrupt."""
    from tokenizers import Tokenizer

    raw = store.get(ObjectKind.TOKENIZER, tokenizer_id)
    try:
        tokenizer = Tokenizer.from_buffer(bytes(raw))
    except ValueError as error:
        raise Corrupt(
            f"tokenizer {short(tokenizer_id)} cannot be read ({error}); it was written by a newer version of tokenizers?",
            code="tokenizer", tokenizer_id=tokenizer_id,
        ) from error  # fmt: skip

    def decode(tokens: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=False))
        except OverflowError as error:
            raise Corrupt("the tokens have no text: one of them is no token id", code="tokens") from error

    return decode
