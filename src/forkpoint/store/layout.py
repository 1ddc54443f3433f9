"""Where objects lie under the root of a local store.

    root/chunks/ab/<62 hex>.safetensors      root/manifests/ab/<62 hex>.json
    root/moves/ab/<62 hex>.json              root/tokenizers/ab/<62 hex>.json
    root/tmp/                                objects being written

Pure names, but for ``scan``. A name that ``path_of`` would not give is junk and is never touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

from forkpoint.ids import ObjectId, ObjectKind, parse_object_id

_FAN_OUT: Final = re.compile(r"[0-9a-f]{2}")
_REST: Final = re.compile(r"[0-9a-f]{62}")


@final
class Layout:
    """Paths of objects under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root
        self.staging: Final = root / "tmp"
        self._folders: Final = {kind: f"{root}/{kind}s" for kind in ObjectKind}

    def path_of(self, kind: ObjectKind, object_id: ObjectId) -> Path:
        """The file of an object.

        Raises:
            InvalidInput: ``invalid_input.id``; so no text from outside can name a path elsewhere.
        """
        digits = parse_object_id(object_id)[3:]
        return Path(f"{self._folders[kind]}/{digits[:2]}/{digits[2:]}{_suffix(kind)}")

    def scan(self, kind: ObjectKind) -> Iterator[ObjectId]:
        """Ids of the regular files that have the right name; folders that vanish meanwhile are passed over."""
        suffix = _suffix(kind)
        for folder in _entries(self._folders[kind]):
            if not _FAN_OUT.fullmatch(folder.name):
                continue
            for entry in _entries(folder.path):
                rest = entry.name.removesuffix(suffix)
                if rest != entry.name and _REST.fullmatch(rest) and entry.is_file():
                    yield ObjectId(f"b3:{folder.name}{rest}")


def _suffix(kind: ObjectKind) -> str:
    return ".safetensors" if kind is ObjectKind.CHUNK else ".json"


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
