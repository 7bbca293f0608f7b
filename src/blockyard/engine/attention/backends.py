"""The attention backends, and which one an engine takes: the first that fits where the KV tensors are."""

from __future__ import annotations

from ...storage import KVCache
from .interface import AttentionBackend
from .sdpa import SdpaBackend

#: In order of preference. Kernels that read block tables on the GPU (FlashAttention, FlashInfer) would stand before
#: the last; none is here yet, see docs/engine.md.
BACKENDS = (SdpaBackend,)


def select_backend(kv_cache: KVCache, max_model_len: int) -> AttentionBackend:
    """The first backend that fits the tensors' device and dtype and what is installed; the last fits everywhere."""
    chosen = next(backend for backend in BACKENDS if backend.fits(kv_cache))
    return chosen(kv_cache, max_model_len)
