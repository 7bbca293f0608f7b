"""KV tensors, and the writes, gathers and copies that plans ask for.

    from blockyard.storage import KVCache, KVLayout, Shard

Needs torch: `pip install 'blockyard[storage]'`.
"""

from ..errors import MissingExtra

try:
    import torch as _torch  # noqa: F401  # so that a missing package is one clear error
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
