"""The attention backends, and which one an engine takes: the one asked for, or the first that can serve its tensors."""

from __future__ import annotations

import warnings

from ...errors import InvalidArgument
from ...storage import KVCache
from ..reasons import reason
from .flash_attention import FlashAttention2, FlashAttention3, TorchVarlen
from .flashinfer import FlashInfer
from .interface import AttentionBackend
from .sdpa import SdpaBackend

AUTO = "auto"
#: In order of preference: kernels that read block tables on the GPU, then the one that runs everywhere.
BACKENDS: tuple[type[AttentionBackend], ...] = (FlashAttention3, FlashInfer, FlashAttention2, TorchVarlen, SdpaBackend)
BACKEND_NAMES: tuple[str, ...] = (AUTO, *(backend.name for backend in BACKENDS))


def select_backend(name: str, kv_cache: KVCache, max_model_len: int) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first that can serve these tensors; the last always can.

    Raises `InvalidArgument` for an unknown name, or with the reason why that backend cannot serve them. What is
    installed and broken, as kernels built for another torch are, "auto" passes over with a warning.
    """
    refusal = f"it must be one of {', '.join(BACKEND_NAMES)}"
    for backend in BACKENDS:
        if name in (AUTO, backend.name):
            made = _made(backend, kv_cache, max_model_len, warns=name == AUTO)
            if not isinstance(made, str):
                return made
            refusal = made
    raise InvalidArgument(f"attention_backend is {name!r}; {refusal}")


def _made(
    backend: type[AttentionBackend], kv_cache: KVCache, max_model_len: int, warns: bool
) -> AttentionBackend | str:
    """The backend, or why it cannot serve these tensors."""
    refusal = backend.refusal(kv_cache)
    if refusal is not None:
        return refusal
    try:
        return backend(kv_cache, max_model_len)
    except (ImportError, OSError) as error:
        broken = f"it is installed and could not be imported: {reason(error)}"
        if warns:
            warnings.warn(f"attention backend {backend.name!r}: {broken}", RuntimeWarning, stacklevel=3)
        return broken
