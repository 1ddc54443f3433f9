"""A quantised GGUF file as one in bfloat16 or float16, by llama.cpp's own quantiser. ``convert_gguf.py FROM TO``

Runs in llama.cpp's environment. The type is the name of the file to write.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp

FILE_TYPES = {"float16": 1, "bfloat16": 32}


def main() -> None:
    """Convert, unless the file is there."""
    source, target = map(Path, sys.argv[1:3])
    if target.exists():
        return
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[target.stem]
    parameters.allow_requantize = True
    parameters.nthread = 1
    partial = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(parameters))
    if status != 0:
        sys.exit(f"llama.cpp could not convert {source}: status {status}")
    partial.rename(target)


if __name__ == "__main__":
    main()
