"""The attention backends and the choice between them."""

from __future__ import annotations

from blockyard.errors import InvalidArgument
from blockyard.storage import KVCache

from ..engine_options import BACKEND_NAMES
from .flash_attention import FlashAttention3
from .interface import AttentionBackend
from .sdpa import SdpaBackend

AUTO = "auto"
#: In order of preference: the kernel that reads block tables on the GPU, then the one that runs everywhere.
BACKENDS: tuple[type[AttentionBackend], ...] = (FlashAttention3, SdpaBackend)


def select_backend(
    name: str, kv_cache: KVCache, max_model_len: int, extras: frozenset[str] = frozenset()
) -> AttentionBackend:
    """Return the backend called `name`, or for "auto" the first that supports these tensors; the last always does.

    `extras` are the special features of the model's attention (`softmax.Extras.names`). Raises `InvalidArgument` for an
    unknown name, or with the reason why that backend cannot serve them.
    """
    if name == AUTO:
        chosen = next(backend for backend in BACKENDS if _refusal(backend, kv_cache, extras) is None)
        return chosen(kv_cache, max_model_len)
    for backend in BACKENDS:
        if backend.name == name:
            refusal = _refusal(backend, kv_cache, extras)
            if refusal is not None:
                raise InvalidArgument(f"attention_backend is {name!r}; {refusal}")
            return backend(kv_cache, max_model_len)
    raise InvalidArgument(f"attention_backend is {name!r}; it must be one of {', '.join(BACKEND_NAMES)}")


def _refusal(backend: type[AttentionBackend], kv_cache: KVCache, extras: frozenset[str]) -> str | None:
    missing = sorted(extras - backend.extras)
    if missing:
        return f"it does not support {', '.join(missing)}, which this model needs"
    return backend.refusal(kv_cache)
