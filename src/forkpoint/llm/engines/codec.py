"""The text side of a transformers model: tokenizer, chat template, end tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

import jinja2

from forkpoint.errors import Incompatible, InvalidInput
from forkpoint.ids import ObjectId, digest_of


@final
class TransformersCodec:
    """Wraps a transformers tokenizer. The serialised form is that of the ``tokenizers`` library (tokenizer.json)."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int]) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise Incompatible(
                f"this model's tokenizer is a {type(tokenizer).__name__}; only those of the tokenizers library can be stored",
                code="tokenizer", field="tokenizer", have=type(tokenizer).__name__, want="a fast tokenizer",
            )  # fmt: skip
        self._tokenizer = tokenizer
        self._serialised: bytes = tokenizer.backend_tokenizer.to_str().encode()
        self.tokenizer_id = digest_of([self._serialised])
        self.template_id = _template_id(tokenizer.chat_template)
        self.end_tokens = tuple(end_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of this string alone, without special tokens."""
        return [int(token) for token in self._tokenizer.encode(_checked(text), add_special_tokens=False)]

    def encode_start(self, text: str) -> list[int]:
        """Token ids of a string that begins a sequence."""
        return [int(token) for token in self._tokenizer.encode(_checked(text), add_special_tokens=True)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens written out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode_visible(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, with the opening of the model's answer."""
        for place, message in enumerate(messages):
            if not message or not all(isinstance(item, str) for pair in message.items() for item in pair):
                raise InvalidInput(
                    f"message {place} is {message!r}; give a role and a content, both as text",
                    code="chat",
                    place=place,
                )
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ValueError) as error:
            raise InvalidInput(
                f"the chat template of this model does not take these messages: {error}", code="chat"
            ) from error
        return self.encode(text)

    def serialised(self) -> bytes:
        """The tokenizer as one JSON object."""
        return self._serialised


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the text is not valid Unicode at character {error.start} (a byte that was not UTF-8?)",
            code="text",
            at=error.start,
        ) from error
    return text


def _template_id(template: str | Mapping[str, str] | None) -> ObjectId | None:
    """Digest of a chat template, or of several by name."""
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return digest_of([text.encode()])
