"""The data plane: KV tensors that carry out plans and decide nothing.

    from blockyard.storage import KVCache, KVLayout, Shard

Needs torch: `pip install 'blockyard[storage]'`.
"""

from ..errors import MissingExtra

try:
    import torch as _torch  # noqa: F401  # asked for here, so that its absence is said in one sentence
except ImportError as error:
    raise MissingExtra("blockyard.storage needs torch: pip install 'blockyard[storage]'") from error

from ..sizing import Shard
from .addresses import SlotAddresses, TableAddresses, int_array, require_range
from .context_shards import ContextShard, IntArray
from .kv_cache import KVCache
from .layout import KVLayout
from .moves import MoveLists
from .states import SlotLists, StateSlots, StateTensor, state_bytes

__all__ = [
    "ContextShard",
    "IntArray",
    "KVCache",
    "KVLayout",
    "MoveLists",
    "Shard",
    "SlotAddresses",
    "SlotLists",
    "StateSlots",
    "StateTensor",
    "TableAddresses",
    "int_array",
    "require_range",
    "state_bytes",
]
