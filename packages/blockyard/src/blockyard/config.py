"""The sizes and switches of a cache are checked once, when they are written down."""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields

from .arguments import require_bool, require_int, shown
from .errors import InvalidArgument
from .groups import LayerGroup, StateSpec
from .hash_seeds import MAX_HASH_SEED
from .tenants import Tenant, TenantGroup, tenant_groups
from .windows import num_least_blocks

MAX_BLOCKS = 2**27
MAX_POOL_BYTES = 2**62
MAX_BLOCK_SIZE = 4096
MAX_SEQS = 2**20
MAX_MODEL_LEN = 2**27
MAX_TABLE_ENTRIES = 2**30
MAX_GROUPS = 64
MAX_HISTORY = 2**24
MAX_STEPS_IN_FLIGHT = 64
MAX_SESSIONS = 2**20
#: What ships in `blockyard.core.policies`.
POLICY_NAMES = ("arc", "density", "fifo", "lfu", "lru", "s3fifo", "score")
#: Rules for states (`core/policies/states/places`), with "every:N" beside them.
PLACE_NAMES = ("last", "junction", "ends", "pow2")
#: Which state is dropped first (`core/policies/states/orders`).
STATE_ORDERS = ("index", "lru")
#: The names of policies as help texts list them.
POLICY_HELP = ", ".join(POLICY_NAMES)


def _share(name: str, value: object) -> float:
    """Return a number from 0 to below 1, as a plain float."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            share = float(value)
        except OverflowError:
            share = math.inf
        if 0 <= share < 1:
            return share
    raise InvalidArgument(f"{name} is {shown(value)}; it must be a number from 0 to below 1")


def _is_place(name: object) -> bool:
    """Return whether it names a rule for states, or is "every:512" or the like."""
    if not isinstance(name, str):
        return False
    rule, _, tokens = name.partition(":")
    is_every = rule == "every" and tokens.isascii() and tokens.isdigit() and len(tokens) < 10
    return name in PLACE_NAMES or (is_every and 1 <= int(tokens) <= MAX_MODEL_LEN)


def require_places(name: str, places: object) -> None:
    """Raise `InvalidArgument` unless it is a tuple of names of rules for states."""
    if not isinstance(places, tuple) or not all(_is_place(place) for place in places):
        raise InvalidArgument(
            f"{name} is {shown(places)}; it must be a tuple of names of "
            f"{', '.join(PLACE_NAMES)}, or every:N with N from 1 to {MAX_MODEL_LEN}"
        )


def _about(line: str, low: int = 0, high: int = 0, *, engine: bool = False, command: bool = False) -> dict[str, object]:
    """Return what else is known of a field: `line` is what commands print of it, `low` and `high` limit an integer.

    engine: whether callers of an engine may set it, in `cache_options`; all others follow from the engine's arguments.
    command: whether `blockyard generate` and `blockyard serve` have an option for it, too.
    """
    return {"help": line, "low": low, "high": high, "engine": engine or command, "command": command}


class _Unset(int):
    """A default that tells a value that was given from one that was not."""


#: Options that only a cache with states uses.
STATE_OPTIONS = ("state_places", "state_order", "cut_chunks")
#: Options that do nothing beside others, by why: there each keeps its default, and any other value is refused.
UNUSED_OPTIONS = {
    "enable_prefix_caching is False": (
        *("eviction_policy", "retention_blocks", "partial_hits", "track_misses", "enable_kv_cache_events"),
        *("state_places", "state_order"),
    ),
    "groups has no StateSpec": STATE_OPTIONS,
    "groups has a StateSpec": ("partial_hits",),
}


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a `KVCacheManager` is made of.

    num_blocks: blocks in the pool, the null block (id 0) included; 2 to 2**27. Or num_bytes: the pool's size in bytes,
        of groups that say how many a token takes; num_blocks is then how many blocks that is (`blocks_in`).
    block_size: tokens a block; 1 to 4096, 16 by default. With `groups` leave it out: each has its own.
    max_num_seqs: rows of the block table, that is sequences that run at once; 1 to 2**20.
    max_model_len: tokens of the longest sequence. The pool may hold fewer (`max_servable_tokens`): a longer prompt is
        then never admitted, and a sequence that grows beyond it ends up preempted.
    enable_prefix_caching: whether full blocks are indexed and hit.
    watermark: share of the blocks that admission leaves free, so that running sequences can grow; 0 to below 1.
    hash_seed: seed of the index's hash function, 0 to 2**62 - 1. None draws a secret one for each manager, so
        that no client can write prompts whose hashes collide and slow the cache down. It never affects what is hit.
    groups: the layer groups that share the pool, for models with sliding windows or several block sizes. Empty: one
        group of full attention. With several groups, or a window, equal prompts that arrive together are not shared:
        each computes its own blocks, and later prompts hit them. Let them wait for the first one to compute, as
        `engine/scheduling` does.
    num_cpu_blocks: blocks of the CPU pool, its null block included, that sequences are swapped out to; 0 for none.
        With a CPU pool equal prompts that arrive together are not shared either.
    keep_evicted: whether the CPU pool also keeps what the pool evicts, for later hits.
    eviction_policy: which idle cached block goes first: the name of a policy (`blockyard.core.policies`), or a
        class or callable that makes one from num_blocks. An unknown name is refused here.
    retention_blocks: most blocks that `retain` may hold back from eviction at a time; 0 for no retention.
    partial_hits: whether a hit may end inside a block, whose first tokens are then copied from a cached one.
    track_misses: whether every token that was not hit gets a cause (`miss_causes`).
    history_size: events that the allocation history remembers; 0 for none.
    residency_sample: follow every n-th block id from allocation to eviction; 0 for none.
    enable_kv_cache_events: whether the manager notes what can be hit and what no more, for `take_events`.
    max_sessions: sessions that are known at a time (`hint`), 0 to 2**20; of more the one heard of longest ago is
        forgotten. With 0 there are none, and every hint is refused.
    state_places: of a cache with states, at which boundaries of a prompt states are kept: names of "last",
        "junction", "ends", "pow2" and "every:N" (docs/states.md).
    state_order: which state is dropped first when room is needed: "index" (learned) or "lru" (docs/states.md). Keys and
        values that no state stands behind are evicted before all of them, in the order of `eviction_policy`.
    cut_chunks: whether `reserve` ends a sequence's tokens at the first boundary at which a state is kept, so that the
        step's last state is saved; False where kernels give states inside a chunk.
    tenants: who share the pool (docs/tenants.md): `Tenant` and `TenantGroup`; empty where the pool is not shared. Their
        floors together fit the pool, its null block and the watermark aside.
    max_steps_in_flight: most steps that are reserved and not ended (`end_step`), 1 to 64. With 2 or more a sequence may
        be reserved for again before its last step is committed, and blocks wait for the steps that may use them.

    Raises `InvalidArgument` for a value outside its limits, and for an option that the others leave unused
    (`UNUSED_OPTIONS`).
    """

    num_blocks: int = field(default=0, metadata=_about("blocks in the pool", 2, MAX_BLOCKS))
    block_size: int = field(default=_Unset(16), metadata=_about("tokens in a block", 1, MAX_BLOCK_SIZE))
    _: KW_ONLY
    max_num_seqs: int = field(default=256, metadata=_about("sequences that run at once", 1, MAX_SEQS))
    max_model_len: int = field(default=8192, metadata=_about("tokens of the longest sequence", 1, MAX_MODEL_LEN))
    enable_prefix_caching: bool = field(default=True, metadata=_about("index full blocks, for later prompts to hit"))
    watermark: float = field(
        default=0.01, metadata=_about("share of the blocks that is kept free when a request is admitted", command=True)
    )
    hash_seed: int | None = field(
        default=None, metadata=_about("seed of the index's hash function", 0, MAX_HASH_SEED, engine=True)
    )
    groups: tuple[LayerGroup | StateSpec, ...] = field(default=(), metadata=_about("layer groups that share the pool"))
    num_cpu_blocks: int = field(default=0, metadata=_about("blocks of a CPU pool", 0, MAX_BLOCKS))
    keep_evicted: bool = field(
        default=True, metadata=_about("keep in the CPU pool what the pool evicts, for later hits", engine=True)
    )
    eviction_policy: object = field(
        default="lru", metadata=_about(f"which idle cached block goes first: {POLICY_HELP}", command=True)
    )
    retention_blocks: int = field(
        default=0, metadata=_about("blocks that may be retained", 0, MAX_BLOCKS, command=True)
    )
    partial_hits: bool = field(default=False, metadata=_about("let a hit end inside a block", engine=True))
    track_misses: bool = field(default=False, metadata=_about("count tokens that were not hit, by cause", command=True))
    history_size: int = field(
        default=0, metadata=_about("events of the pool to remember", 0, MAX_HISTORY, command=True)
    )
    residency_sample: int = field(
        default=0,
        metadata=_about("measure how long every N-th block lives and lies idle", 0, MAX_BLOCKS, command=True),
    )
    enable_kv_cache_events: bool = field(default=False, metadata=_about("note what can be hit, for `take_events`"))
    max_steps_in_flight: int = field(
        default=1, metadata=_about("steps that are reserved and not ended", 1, MAX_STEPS_IN_FLIGHT)
    )
    max_sessions: int = field(
        default=65_536, metadata=_about("sessions that are known at a time", 0, MAX_SESSIONS, engine=True)
    )
    state_places: tuple[str, ...] = field(
        default=("junction", "ends", "pow2"), metadata=_about("boundaries at which states are kept", engine=True)
    )
    state_order: str = field(
        default="index", metadata=_about(f"which state goes first: {', '.join(STATE_ORDERS)}", engine=True)
    )
    cut_chunks: bool = field(default=True, metadata=_about("end a step's tokens where a state is kept"))
    tenants: tuple[Tenant | TenantGroup, ...] = field(
        default=(), metadata=_about("who share the pool, and their shares", engine=True)
    )
    num_bytes: InitVar[int | None] = None

    def __post_init__(self, num_bytes: object) -> None:
        if num_bytes is not None:
            self._take_bytes(num_bytes)
        elif self.num_blocks == 0 and not isinstance(self.num_blocks, bool):
            raise InvalidArgument(
                f"num_blocks is 0; it must be from 2 to {MAX_BLOCKS}, or num_bytes must be given in its place"
            )
        has_block_size = type(self.block_size) is not _Unset
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool":
                require_bool(each.name, value)
            elif each.metadata["high"] and not (value is each.default is None):
                # Stored as plain integers: what is compiled takes no others.
                number = require_int(each.name, value, each.metadata["low"], each.metadata["high"])
                object.__setattr__(self, each.name, number)
        if isinstance(self.eviction_policy, str) and self.eviction_policy not in POLICY_NAMES:
            raise InvalidArgument(
                f"eviction_policy is {shown(self.eviction_policy)}; it must be one of {', '.join(POLICY_NAMES)}, "
                f"or make an EvictionPolicy"
            )
        self._check_groups()
        self._check_block_size(has_block_size)
        self._check_unused()
        if self.num_cpu_blocks == 1:
            require_int("num_cpu_blocks", self.num_cpu_blocks, 2, MAX_BLOCKS)
        object.__setattr__(self, "watermark", _share("watermark", self.watermark))
        self.require_floors(self.num_blocks)
        entries = self.max_num_seqs * self.max_blocks_per_seq
        if entries > MAX_TABLE_ENTRIES:
            raise InvalidArgument(
                f"max_num_seqs * blocks of max_model_len is {entries} table entries; the limit is {MAX_TABLE_ENTRIES}"
            )

    def _take_bytes(self, num_bytes: object) -> None:
        """Make blocks of the budget, after the groups alone are checked, of which they are."""
        if self.num_blocks != 0:
            raise InvalidArgument(
                f"num_blocks is {shown(self.num_blocks)} and num_bytes is {shown(num_bytes)}; give one of the two"
            )
        self._check_group_types()
        object.__setattr__(self, "num_blocks", self.blocks_in(num_bytes))

    def blocks_in(self, num_bytes: object, name: str = "num_bytes") -> int:
        """Return how many blocks of the pool `num_bytes` are, at most 2**27; what is left is less than a block.

        name: of the bytes, for errors. Raises `InvalidArgument` where groups do not say how many bytes a token takes,
        and for bytes too few for the null block and the shortest sequence: a block in each group, or a state.
        """
        size = require_int(name, num_bytes, 1, MAX_POOL_BYTES)
        if self.block_bytes == 0:
            raise InvalidArgument(
                f"{name} is {size}, and the bytes of a block are not known: every attention group needs "
                f"token_bytes (groups=(LayerGroup(16, token_bytes=...),)), or give num_blocks"
            )
        least = 1 + max(len(self.layer_groups), self.state_blocks)
        number = min(size // self.block_bytes, MAX_BLOCKS)
        if number < least:
            raise InvalidArgument(
                f"{name} is {size}; a block has {self.block_bytes} bytes, and the shortest sequence needs {least} "
                f"blocks, the null block included: at least {least * self.block_bytes} bytes"
            )
        return number

    def require_floors(self, num_blocks: int) -> None:
        """Raise `InvalidArgument` unless the floors of all tenants fit `num_blocks` blocks. O(tenants)."""
        floors = sum(group.floor for group in tenant_groups(self.tenants))
        usable = num_blocks - 1 - int(self.watermark * num_blocks)
        if floors > usable:
            raise InvalidArgument(
                f"tenants have floors (min_blocks) of {floors} blocks together; num_blocks is {num_blocks}: {usable} "
                f"without the null block and the watermark"
            )

    def _check_group_types(self) -> None:
        kinds = (LayerGroup, StateSpec)
        if not isinstance(self.groups, tuple) or not all(isinstance(group, kinds) for group in self.groups):
            raise InvalidArgument(f"groups is {shown(self.groups)}; it must be a tuple of LayerGroup and StateSpec")
        if len(self.groups) > MAX_GROUPS:
            raise InvalidArgument(f"groups has {len(self.groups)} items; the limit is {MAX_GROUPS}")
        # Lists here and below: a Ctrl-C that comes where a generator is closed is lost.
        if self.groups and not [group for group in self.groups if isinstance(group, LayerGroup)]:
            raise InvalidArgument("groups has only a StateSpec; add at least one LayerGroup")

    def _check_groups(self) -> None:
        self._check_group_types()
        if self.partial_hits and self.hash_block_size != self.hit_alignment:
            raise InvalidArgument(
                f"partial_hits is True for groups with block sizes {self._alignments()}; they must be equal"
            )
        require_places("state_places", self.state_places)
        if self.state_order not in STATE_ORDERS:
            raise InvalidArgument(
                f"state_order is {shown(self.state_order)}; it must be one of {', '.join(STATE_ORDERS)}"
            )
        if self.has_states:
            self._check_states()

    def _check_block_size(self, is_given: bool) -> None:
        """Let `block_size` say what is hashed together, and refuse one that no group has."""
        sizes = [group.block_size for group in self.layer_groups]
        if self.groups and is_given and self.block_size not in (*sizes, self.hash_block_size):
            raise InvalidArgument(
                f"block_size is {self.block_size} beside groups, which have blocks of {sizes} tokens; leave it out"
            )
        if not is_given:
            # Not given in a copy either (`dataclasses.replace`), whose groups may be others.
            object.__setattr__(self, "block_size", _Unset(self.hash_block_size))

    def _check_unused(self) -> None:
        """Refuse options that do nothing beside the others."""
        holds = {
            "enable_prefix_caching is False": not self.enable_prefix_caching,
            "groups has no StateSpec": not self.has_states,
            "groups has a StateSpec": self.has_states,
        }
        for reason, names in UNUSED_OPTIONS.items():
            for name in names if holds[reason] else ():
                value, default = getattr(self, name), CACHE_FIELDS[name].default
                if not isinstance(value, (str, float, int, tuple)) or value != default:
                    raise InvalidArgument(f"{name} is {shown(value)}, which does nothing while {reason}; leave it out")

    def _check_states(self) -> None:
        """Refuse states, unless the bytes of a block are known, of which one fits the pool."""
        if self.block_bytes == 0:
            sizes = [group.token_bytes for group in self.layer_groups]
            raise InvalidArgument(
                f"groups has a StateSpec, and LayerGroups with token_bytes of {sizes}; each must be above 0"
            )
        if self.state_blocks > self.num_blocks - 1:
            raise InvalidArgument(
                f"state_bytes is {self.state_bytes}, {self.state_blocks} blocks of {self.block_bytes} bytes; the pool "
                f"has {self.num_blocks - 1}"
            )

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state: `groups` has a `StateSpec`."""
        return self.state_bytes > 0

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block of the pool: the most that a block of any group takes; 0 if one does not say."""
        sizes = [group.block_bytes for group in self.layer_groups]
        return max(sizes) if min(sizes) > 0 else 0

    @property
    def padding_bytes(self) -> tuple[int, ...]:
        """Return how many bytes each group leaves empty in a block of its own, in the order of `groups`; of states, all
        together, in the last block of each."""
        return tuple(
            self.state_blocks * self.block_bytes - self.state_bytes
            if isinstance(group, StateSpec)
            else max(self.block_bytes - group.block_bytes, 0)
            for group in self.groups
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a state, of every `StateSpec` together; 0 without one."""
        return sum(group.state_bytes for group in self.groups if isinstance(group, StateSpec))

    @property
    def state_blocks(self) -> int:
        """Blocks of the pool that a checkpointed state takes; 0 without states."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the groups with a block table, or the one that `block_size` stands for."""
        return tuple(group for group in self.groups if isinstance(group, LayerGroup)) or (LayerGroup(self.block_size),)

    @property
    def hash_block_size(self) -> int:
        """Tokens that are hashed and compared together: the greatest common divisor of all block sizes."""
        return math.gcd(*self._alignments())

    @property
    def hit_alignment(self) -> int:
        """Tokens whose multiples a hit can end at: the least common multiple of all block sizes.

        Also the tokens between the positions at which a state can be checkpointed.
        """
        return math.lcm(*self._alignments())

    def _alignments(self) -> list[int]:
        """Return the block size of each `LayerGroup` and the `checkpoint_every` of each `StateSpec`."""
        groups = self.groups or self.layer_groups
        return [group.block_size if isinstance(group, LayerGroup) else group.checkpoint_every for group in groups]

    @property
    def is_mapped(self) -> bool:
        """Whether what is hashed and what is stored are different blocks: several groups, windows, or a CPU pool."""
        groups = self.layer_groups
        return len(groups) > 1 or self.has_states or groups[0].sliding_window > 0 or self.num_cpu_blocks > 0

    @property
    def max_servable_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds when it runs alone, at most `max_model_len`. O(log)."""
        usable = self.num_blocks - 1 - self.watermark_blocks
        return bisect_right(range(1, self.max_model_len + 1), usable, key=self._num_least_blocks)

    def _num_least_blocks(self, num_tokens: int) -> int:
        """Count the blocks of all groups without which a sequence of `num_tokens` tokens cannot run, even alone."""
        groups = self.layer_groups
        return sum(num_least_blocks(num_tokens, group.sliding_window, group.block_size) for group in groups)

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of `hash_block_size` of a sequence of `max_model_len` tokens: the width of the block table."""
        return -(-self.max_model_len // self.hash_block_size)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.num_blocks)


#: The fields of a cache's config by name; `metadata` has what `_about` says of each.
CACHE_FIELDS = {each.name: each for each in fields(CacheConfig)}
#: The fields that callers of an engine may set, in `cache_options`.
CACHE_OPTIONS = tuple(sorted(name for name, each in CACHE_FIELDS.items() if each.metadata["engine"]))
#: Those of them that `blockyard generate` and `blockyard serve` have an option for, by the same name.
COMMAND_OPTIONS = tuple(name for name, each in CACHE_FIELDS.items() if each.metadata["command"])
