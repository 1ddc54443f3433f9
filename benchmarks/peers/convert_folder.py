"""The bundled model as a folder of safetensors in bfloat16, for peers that read such folders. ``convert_folder.py FOLDER``

Runs in the project's own environment. Dequantised exactly as Forkpoint does it, so that all engines compute the same model.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from forkpoint.config import Config
from forkpoint.llm.engines.sources import BUNDLED, load_model


def main() -> None:
    """Dequantise, unless the folder is there."""
    folder = Path(sys.argv[1])
    if folder.is_dir():
        return
    loaded = load_model(
        BUNDLED,
        dtype="bfloat16",
        cache=Config.from_environment().cache_dir,
        trust_remote_code=False,
        attention="sdpa",
        note=lambda text: print(f"peers: {text}", file=sys.stderr),
    )
    weights = next(path for path in loaded.files if path.suffix == ".safetensors")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(weights.parent, partial)
    partial.rename(folder)


if __name__ == "__main__":
    main()
