"""Converts GGUF files once to safetensors, in the user's cache folder, and checks the result by hash.

Reading a GGUF file means dequantizing it, which takes seconds even for a small model; the converted folder loads in
less than one. The folder's name carries the hash of the GGUF file, and a manifest the hashes of the folder's files, so
a damaged copy is converted again. One process converts at a time; others, such as further ranks, wait and use its
folder.
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
from filelock import FileLock

from blockyard.arguments import reason
from blockyard.errors import MissingExtra, ModelError

_MANIFEST = "blockyard.json"
#: Files that a folder must have, whatever its manifest lists.
_NEEDED = ("config.json", "model.safetensors")
#: Version of the conversion; increase it when the conversion changes.
_FORMAT = 1


def converted_folder(gguf_file: Path, cache_folder: Path | None = None) -> Path:
    """Return the folder with `gguf_file` as float32 safetensors and its tokenizer; convert it first if needed.

    It is in `cache_folder`, by default "blockyard" in the user's cache folder. Raises `ModelError` if the file is not a
    readable model or the folder cannot be written, and `MissingExtra` if a package for the conversion is missing.
    """
    try:
        parent = (cache_folder or platformdirs.user_cache_path("blockyard")) / "models"
        target = parent / f"{gguf_file.stem}-{file_digest(gguf_file)[:16]}-v{_FORMAT}"
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent.with_name("models.lock")):
            if not is_whole(target):
                _install(gguf_file, target)
    except OSError as error:
        raise ModelError(f"{gguf_file.name} could not be converted into the cache folder: {error}") from error
    return target


def is_whole(folder: Path) -> bool:
    """Return whether a converted folder is complete and all of its files match the manifest.

    Reads all of them: 0.3 s for 500 MB.
    """
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        has_needed = all(name in files for name in _NEEDED)
        return has_needed and all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _install(gguf_file: Path, target: Path) -> None:
    """Convert into a temporary folder, and rename it once it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="converting-") as work:
        made = Path(work) / "model"
        _convert(gguf_file, made)
        if not is_whole(made):
            raise ModelError(f"{gguf_file.name} was converted, but the folder has no config or weights to load")
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)


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
    # Inside a process group, ranks but the first would write nothing of the model.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(folder, max_shard_size=2**62)
    tokenizer.save_pretrained(folder)
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))
