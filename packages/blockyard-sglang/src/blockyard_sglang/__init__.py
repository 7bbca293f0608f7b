"""Blockyard in SGLang: `--radix-cache-backend blockyard`.

SGLang finds `register` through its plug-in group `sglang.srt.plugins` if both are installed in one environment, and
imports the rest when a server needs it. Importing this package does not import SGLang. See docs/sglang.md.
"""

from __future__ import annotations

from typing import Any

from blockyard.engine_versions import SGLANG
from blockyard.signatures import engine_imports

#: The backend's name in `--radix-cache-backend`.
BACKEND = "blockyard"

#: Values of `--radix-eviction-policy` besides SGLang's own "lru" and "lfu".
POLICIES = ("fifo", "s3fifo", "arc", "score", "density")


def register() -> None:
    """Register the backend and Blockyard's eviction policies with SGLang. A second call changes nothing.

    SGLang calls this at every start. The version is checked only when a cache is created.

    Raises:
        MissingExtra: if SGLang is not installed, or lacks these names.
    """
    with engine_imports(SGLANG, __name__, any_version=True):
        from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES, add_radix_eviction_policy_choices
        from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, make_cache)
    add_radix_eviction_policy_choices([name for name in POLICIES if name not in RADIX_EVICTION_POLICY_CHOICES])


def make_cache(context: Any) -> Any:
    """Create the cache for a configured server; SGLang's factory.

    Args:
        context: SGLang's `TreeCacheBuildContext`.

    Raises:
        MissingExtra: for an unsupported version of SGLang.
        RuntimeError: if methods of a supported version differ.
        InvalidArgument: for an unsupported model or option.
    """
    from .cache import BlockPoolCache
    from .contract import require_known_sglang, require_supported

    require_known_sglang()
    require_supported(context)
    return BlockPoolCache(context.params)
