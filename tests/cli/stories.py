"""A small repository as a user would have it: two commits on main, a branch beside it, a tag, text that can be read back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.repo.drafts import draft_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forkpoint.ids import ManifestId
from forkpoint.repo.repository import Repository
from forkpoint.state.draft import Draft

SCENE = "The keeper opened the door and the light went out. " * 8
LATER = SCENE + "Then the sea rose."
STORM = SCENE + "Then a storm came, naïve and loud."


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Where it is, and its manifests: ``main`` is at ``second``, ``storm`` at ``storm``; both come from ``first``, tagged ``v1``."""

    folder: Path
    first: ManifestId
    second: ManifestId
    storm: ManifestId


@cache
def tokenizer() -> bytes:
    """A tokenizer of bytes, as stored: token ids 0 to 255 are the bytes of the text, so a character can be several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str().encode()


def written(text: str, parent: ManifestId | None = None, **options: object) -> Draft:
    """A draft whose token history is ``text``."""
    tokens = Tokenizer.from_buffer(tokenizer()).encode(text).ids
    draft = draft_of(tokens, parent=parent, tokenizer=tokenizer(), **options)  # type: ignore[arg-type]
    return replace(draft, boundary={**draft.boundary, "prompt_length": 12, "sampling": {"seed": 7, "top_k": 0}})


def tell(repository: Repository) -> dict[str, ManifestId]:
    """Fill a repository with the story."""
    first = repository.publish(written(SCENE), branch="main", message="the scene").manifest_id
    repository.tag("v1", first)
    second = repository.publish(written(LATER, first), branch="main", message="the sea\n\nit rises").manifest_id
    storm = repository.publish(written(STORM, first), branch="storm", message="a storm").manifest_id
    return {"first": first, "second": second, "storm": storm}
