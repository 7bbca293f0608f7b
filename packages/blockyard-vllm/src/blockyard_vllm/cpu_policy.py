"""Blockyard's eviction policies for vLLM's own CPU tier, by configuration alone.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592, "eviction_policy": "density",
                                      "cache_policy_module_path": "blockyard_vllm.cpu_policy"}}'

`eviction_policy` is any name that `BlockPool` accepts. vLLM uses its own `lru` and `arc` for these names; "LRU" and
"ARC" select Blockyard's. For `CachePolicy` of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from typing import Any

from blockyard import InvalidArgument
from blockyard.engine_versions import VLLM
from blockyard.policies import make_policy
from blockyard.signatures import engine_imports

from .chunk_order import ChunkOrder

with engine_imports(VLLM, __name__):
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

#: Names for policies that vLLM would otherwise take for its own.
_OURS = {"LRU": "lru", "ARC": "arc"}


def __getattr__(name: str) -> type[CachePolicy]:
    """Return a policy class; vLLM looks up `eviction_policy` in this module.

    Raises:
        AttributeError: for an unknown policy.
    """
    policy = _OURS.get(name, name)
    try:
        if name.startswith("_"):
            raise InvalidArgument(f"eviction_policy is {name!r}")
        make_policy(policy, 2)
    except InvalidArgument as error:
        raise AttributeError(f"module {__name__!r} has no {name!r}: {error}; LRU and ARC are Blockyard's too") from None

    def begin(self: Any, cache_capacity: int) -> None:
        ChunkOrder.__init__(self, cache_capacity, policy)

    made = type(name, (ChunkOrder, CachePolicy), {"__init__": begin, "__doc__": f"{policy} for vLLM's CPU tier."})
    globals()[name] = made
    return made
