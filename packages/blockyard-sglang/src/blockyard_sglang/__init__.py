"""Blockyard in SGLang: `--radix-cache-backend blockyard`.

SGLang finds `register` by its plug-in group `sglang.srt.plugins` when both are installed in one environment, and
imports the rest when a server asks for it. Needs SGLang, which `blockyard` itself does not import. See docs/sglang.md.
"""

from __future__ import annotations

from typing import Any

from blockyard.engine_versions import SGLANG
from blockyard.signatures import engine_imports

#: The backend's name in `--radix-cache-backend`.
BACKEND = "blockyard"

#: What `--radix-eviction-policy` may say besides SGLang's own "lru" and "lfu".
POLICIES = ("fifo", "s3fifo", "arc", "score", "density")


def register() -> None:
    """Register the backend and our eviction policies with SGLang. A second call changes nothing.

    SGLang calls it at every start; only a cache that is made needs a known version. Raises `MissingExtra` if SGLang is
    not installed, or is a version without these names.
    """
    with engine_imports(SGLANG, __name__, any_version=True):
        from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES, add_radix_eviction_policy_choices
        from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, make_cache)
    add_radix_eviction_policy_choices([name for name in POLICIES if name not in RADIX_EVICTION_POLICY_CHOICES])


def make_cache(context: Any) -> Any:
    """SGLang's factory: the cache for a server that has been configured. context: its `TreeCacheBuildContext`.

    Raises `MissingExtra` for another version of SGLang, RuntimeError if methods differ from those that the adapter was
    written for, and `InvalidArgument` for a model or option that is not supported.
    """
    from .cache import BlockPoolCache
    from .contract import require_known_sglang, require_supported

    require_known_sglang()
    require_supported(context)
    return BlockPoolCache(context.params)
