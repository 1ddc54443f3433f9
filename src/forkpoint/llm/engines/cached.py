"""Small texts kept in the cache folder. They are read by whoever wrote them and checked when they are read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def put_text(path: Path, text: str) -> None:
    """Write ``path``, whole or not at all. A cache that cannot be written costs time, not correctness."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)  # noqa: PTH105
    except OSError:
        return
