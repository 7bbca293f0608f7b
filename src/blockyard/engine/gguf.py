"""GGUF files converted once to safetensors, in the user's cache folder, checked by hash.

Reading a GGUF file means dequantizing it: seconds for a small model, every time. The converted folder loads in less
than one. Its name carries the hash of the GGUF file, so that another file never meets it; a manifest carries the
hashes of what was written, so that a broken copy is made anew instead of served.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from ..errors import MissingExtra, ModelError
from .reasons import reason

_MANIFEST = "blockyard.json"
#: Raised when the conversion changes, so that older folders are left behind.
_FORMAT = 1


def converted_folder(gguf_file: Path, cache_folder: Path | None = None) -> Path:
    """Return the folder with `gguf_file` as safetensors in float32, and its tokenizer; convert it if need be.

    cache_folder: where it is kept; "blockyard" in the user's cache folder if None. Raises `ModelError` if the file
    is no readable model or the folder cannot be written, `MissingExtra` if a package for the conversion is absent.
    """
    try:
        parent = (cache_folder or platformdirs.user_cache_path("blockyard")) / "models"
        target = parent / f"{gguf_file.stem}-{file_digest(gguf_file)[:16]}-v{_FORMAT}"
        if is_whole(target):
            return target
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix="converting-") as work:
            _convert(gguf_file, Path(work) / "model")
            _install(Path(work) / "model", target)
    except OSError as error:
        raise ModelError(f"{gguf_file.name} could not be converted into the cache folder: {error}") from error
    return target


def is_whole(folder: Path) -> bool:
    """Whether every file of a converted folder is as it was written. Reads all of it: 0.3 s for 500 MB."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        return all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf_file: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the reader draws a bar that no option turns off
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise MissingExtra(f"reading GGUF needs more packages: pip install 'blockyard[engine]' ({error})") from error
    except Exception as error:  # the reader raises types of many kinds, some of them bare Exception
        if "pip install" in str(error):
            raise MissingExtra(f"reading GGUF needs more packages: {reason(error)}") from error
        raise ModelError(f"{gguf_file} could not be read as a GGUF model: {reason(error)}") from error
    _save(model, tokenizer, folder)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    # The weights are plain float32 by now, but the model still calls itself quantized and would refuse to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))


def _install(made: Path, target: Path) -> None:
    """Move a finished folder into place; another process may have been faster, which is as good."""
    if target.exists() and not is_whole(target):
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        if not is_whole(target):
            raise
