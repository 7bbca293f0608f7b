"""`CacheConfig`: the size and the options of a cache, checked when the config is made."""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from dataclasses import KW_ONLY, Field, InitVar, dataclass, field, fields, replace
from functools import wraps
from typing import Any, TypeVar

from .arguments import require_int, shown
from .cache_options import (
    MAX_BLOCKS,
    MAX_MODEL_LEN,
    CPUPoolConfig,
    HintConfig,
    ObserveConfig,
    StateConfig,
    about,
    check_fields,
    option_name,
)
from .errors import InvalidArgument
from .groups import LayerGroup, StateSpec
from .hash_seeds import MAX_HASH_SEED
from .tenants import Tenant, TenantGroup, tenant_groups
from .windows import num_least_blocks

MAX_POOL_BYTES = 2**62
MAX_BLOCK_SIZE = 4096
MAX_SEQS = 2**20
MAX_TABLE_ENTRIES = 2**30
MAX_GROUPS = 64
MAX_STEPS_IN_FLIGHT = 64
#: The policies of `blockyard.core.policies`.
POLICY_NAMES = ("arc", "density", "fifo", "lfu", "lru", "s3fifo", "score")
#: The names of policies as help texts list them.
POLICY_HELP = ", ".join(POLICY_NAMES)


def _share(name: str, value: object) -> float:
    """Return `value` as a float. Raises `InvalidArgument` unless it is a number from 0 to below 1."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            share = float(value)
        except OverflowError:
            share = math.inf
        if 0 <= share < 1:
            return share
    raise InvalidArgument(f"{name} is {shown(value)}; it must be a number from 0 to below 1")


class _Unset(int):
    """A default that differs in type from a given value."""


_Config = TypeVar("_Config", bound=type)


def _pointing_to_parts(kind: _Config) -> _Config:
    """Let the constructor of `CacheConfig` point to the part of an option that was given outside of its part."""
    make = kind.__init__  # type: ignore[misc]

    @wraps(make)
    def init(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name in _PART_OF:
                part, own = _PART_OF[name], CACHE_FIELDS[name].name
                raise TypeError(
                    f"CacheConfig has no argument {name}: pass {part}={_PARTS[part].__name__}({own}=...) instead"
                )
        make(self, *args, **options)

    kind.__init__ = init  # type: ignore[misc]
    return kind


#: Options that only a cache with states uses.
STATE_OPTIONS = ("state_checkpoints", "state_order", "cut_chunks")
#: Options that would do nothing, by the reason. With any value but its default such an option is refused.
UNUSED_OPTIONS = {
    "enable_prefix_caching is False": (
        *("eviction_policy", "retention_blocks", "partial_hits", "track_misses", "enable_kv_cache_events"),
        *("state_checkpoints", "state_order"),
    ),
    "groups has no StateSpec": STATE_OPTIONS,
    "groups has a StateSpec": ("partial_hits",),
}


@_pointing_to_parts
@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The size and the options of a `KVCacheManager`.

    Args:
        num_blocks: blocks in the pool, the null block (id 0) included; 2 to 2**27. Or give num_bytes.
        block_size: tokens in a block; 1 to 4096. With `groups` leave it out: each group has its own.
        max_num_seqs: most sequences that run at once, 1 to 2**20. Each has a row in the block table.
        max_model_len: tokens of the longest sequence. The pool may hold fewer (`max_servable_tokens`): a longer prompt
            is then never admitted, and a sequence that grows beyond it is preempted in the end.
        groups: layers that need different tokens of a sequence (sliding windows, block sizes) or keep states:
            `LayerGroup` and `StateSpec`, which share the pool. Empty for full attention in all layers. With several
            groups, or a window, equal prompts that arrive together do not share blocks before they are computed: let
            the later ones wait, as the engine's scheduler does.
        enable_prefix_caching: whether full blocks are indexed, for later prompts to hit.
        partial_hits: whether a hit may end inside a block, whose first tokens are then copied from a cached block.
        eviction_policy: which idle cached block is evicted first: the name of a policy (`blockyard.policies`), or
            a class or function that makes one from num_blocks.
        watermark: share of the blocks that admission leaves free for running sequences to grow into; 0 to below 1.
        hash_seed: seed of the index's hash function, 0 to 2**62 - 1. None draws a secret one for each manager, so that
            no client can write prompts whose hashes collide. It never changes a hit.
        max_steps_in_flight: most steps that are reserved and not ended (`end_step`), 1 to 64. With 2 or more a sequence
            may be reserved for again before its last step is committed, and freed blocks wait for the steps that may
            still use them.
        tenants: who shares the pool, `Tenant` and `TenantGroup` (docs/tenants.md); empty if nobody does.
        states: which states of a hybrid model are checkpointed.
        cpu: the CPU pool.
        hints: limits of `retain` and `hint`.
        observe: records that the cache keeps about itself.
        num_bytes: size of the pool in bytes instead of num_blocks; every `LayerGroup` then needs token_bytes.

    Raises:
        InvalidArgument: if a value is outside its limits, or an option would do nothing beside the others
            (`UNUSED_OPTIONS`).

    >>> from blockyard import CacheConfig, ObserveConfig
    >>> CacheConfig(1000, max_num_seqs=64, observe=ObserveConfig(track_misses=True)).max_servable_tokens
    8192
    """

    num_blocks: int = field(default=0, metadata=about("blocks in the pool", 2, MAX_BLOCKS))
    block_size: int = field(default=_Unset(16), metadata=about("tokens in a block", 1, MAX_BLOCK_SIZE))
    _: KW_ONLY
    max_num_seqs: int = field(default=256, metadata=about("sequences that run at once", 1, MAX_SEQS))
    max_model_len: int = field(default=8192, metadata=about("tokens of the longest sequence", 1, MAX_MODEL_LEN))
    groups: tuple[LayerGroup | StateSpec, ...] = field(default=(), metadata=about("layer groups that share the pool"))
    enable_prefix_caching: bool = field(default=True, metadata=about("index full blocks, for later prompts to hit"))
    partial_hits: bool = field(default=False, metadata=about("let a hit end inside a block", engine=True))
    eviction_policy: object = field(
        default="lru", metadata=about(f"which idle cached block goes first: {POLICY_HELP}", command=True)
    )
    watermark: float = field(
        default=0.01, metadata=about("share of the blocks that is kept free when a request is admitted", command=True)
    )
    hash_seed: int | None = field(
        default=None, metadata=about("seed of the index's hash function", 0, MAX_HASH_SEED, engine=True)
    )
    max_steps_in_flight: int = field(
        default=1, metadata=about("steps that are reserved and not ended", 1, MAX_STEPS_IN_FLIGHT)
    )
    tenants: tuple[Tenant | TenantGroup, ...] = field(
        default=(), metadata=about("who share the pool, and their shares", engine=True)
    )
    states: StateConfig = field(default=StateConfig(), metadata=about("which states are checkpointed"))
    cpu: CPUPoolConfig = field(default=CPUPoolConfig(), metadata=about("the CPU pool"))
    hints: HintConfig = field(default=HintConfig(), metadata=about("limits of retention and sessions"))
    observe: ObserveConfig = field(default=ObserveConfig(), metadata=about("what the cache records about itself"))
    num_bytes: InitVar[int | None] = None

    def __post_init__(self, num_bytes: object) -> None:
        if num_bytes is not None:
            self._take_bytes(num_bytes)
        elif self.num_blocks == 0 and not isinstance(self.num_blocks, bool):
            raise InvalidArgument(
                f"num_blocks is 0; it must be from 2 to {MAX_BLOCKS}, or num_bytes must be given in its place"
            )
        has_block_size = type(self.block_size) is not _Unset
        check_fields(self)
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise InvalidArgument(f"{name} is {shown(getattr(self, name))}; it must be of class {kind.__name__}")
        if isinstance(self.eviction_policy, str) and self.eviction_policy not in POLICY_NAMES:
            raise InvalidArgument(
                f"eviction_policy is {shown(self.eviction_policy)}; it must be one of {', '.join(POLICY_NAMES)}, "
                f"or make an EvictionPolicy"
            )
        self._check_groups()
        self._check_block_size(has_block_size)
        self._check_unused()
        object.__setattr__(self, "watermark", _share("watermark", self.watermark))
        self.require_guarantees(self.num_blocks)
        entries = self.max_num_seqs * self.max_blocks_per_seq
        if entries > MAX_TABLE_ENTRIES:
            raise InvalidArgument(
                f"max_num_seqs * blocks of max_model_len is {entries} table entries; the limit is {MAX_TABLE_ENTRIES}"
            )

    def _take_bytes(self, num_bytes: object) -> None:
        """Compute num_blocks from num_bytes. Checks the groups first, because they say how large a block is."""
        if self.num_blocks != 0:
            raise InvalidArgument(
                f"num_blocks is {shown(self.num_blocks)} and num_bytes is {shown(num_bytes)}; give one of the two"
            )
        self._check_group_types()
        object.__setattr__(self, "num_blocks", self.blocks_in(num_bytes))

    def blocks_in(self, num_bytes: object, name: str = "num_bytes") -> int:
        """Return how many blocks fit into `num_bytes`, at most 2**27.

        Args:
            num_bytes: size of a pool, 1 to 2**62.
            name: what errors call the size.

        Raises:
            InvalidArgument: if a `LayerGroup` has no token_bytes, or the size holds less than the null block and the
                shortest sequence (a block of each group, or a state).
        """
        size = require_int(name, num_bytes, 1, MAX_POOL_BYTES)
        if self.block_bytes == 0:
            raise InvalidArgument(
                f"{name} is {size}, and the bytes of a block are unknown: give every LayerGroup its token_bytes "
                f"(groups=(LayerGroup(16, token_bytes=...),)), or give num_blocks"
            )
        least = 1 + max(len(self.layer_groups), self.state_blocks)
        number = min(size // self.block_bytes, MAX_BLOCKS)
        if number < least:
            raise InvalidArgument(
                f"{name} is {size}; a block has {self.block_bytes} bytes, and the shortest sequence needs {least} "
                f"blocks, the null block included: at least {least * self.block_bytes} bytes"
            )
        return number

    def require_guarantees(self, num_blocks: int) -> None:
        """Raise `InvalidArgument` unless the guarantees of all tenants fit `num_blocks` blocks. O(tenants)."""
        guaranteed = sum(group.guarantee for group in tenant_groups(self.tenants))
        usable = num_blocks - 1 - int(self.watermark * num_blocks)
        if guaranteed > usable:
            raise InvalidArgument(
                f"tenants have guarantees (min_blocks) of {guaranteed} blocks together; num_blocks is {num_blocks}: "
                f"{usable} without the null block and the watermark"
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
        if self.has_states:
            self._check_states()

    def _check_block_size(self, is_given: bool) -> None:
        """Set `block_size` to `hash_block_size` unless it was given. Raises `InvalidArgument` if no group has it."""
        sizes = [group.block_size for group in self.layer_groups]
        if self.groups and is_given and self.block_size not in (*sizes, self.hash_block_size):
            raise InvalidArgument(
                f"block_size is {self.block_size} beside groups, which have blocks of {sizes} tokens; leave it out"
            )
        if not is_given:
            # Not given in a copy either (`dataclasses.replace`), whose groups may be others.
            object.__setattr__(self, "block_size", _Unset(self.hash_block_size))

    def _check_unused(self) -> None:
        """Raise `InvalidArgument` for an option that would do nothing."""
        holds = {
            "enable_prefix_caching is False": not self.enable_prefix_caching,
            "groups has no StateSpec": not self.has_states,
            "groups has a StateSpec": self.has_states,
        }
        for reason, names in UNUSED_OPTIONS.items():
            for name in names if holds[reason] else ():
                value, default = self.option(name), CACHE_FIELDS[name].default
                if not isinstance(value, (str, float, int, tuple)) or value != default:
                    own = f"{_PART_OF[name]}.{CACHE_FIELDS[name].name}" if name in _PART_OF else name
                    raise InvalidArgument(f"{own} is {shown(value)}, which does nothing while {reason}; leave it out")

    def _check_states(self) -> None:
        """Raise `InvalidArgument` unless the bytes of a block are known and a state fits the pool."""
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

    def option(self, name: str) -> Any:
        """Return the value of an option.

        Args:
            name: name of the option, a key of `CACHE_FIELDS`.
        """
        config = getattr(self, _PART_OF[name]) if name in _PART_OF else self
        return getattr(config, CACHE_FIELDS[name].name)

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state: `groups` has a `StateSpec`."""
        return self.state_bytes > 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool: the most that a block of any group takes; 0 if a group has no token_bytes."""
        sizes = [group.block_bytes for group in self.layer_groups]
        return max(sizes) if min(sizes) > 0 else 0

    @property
    def padding_bytes(self) -> tuple[int, ...]:
        """Bytes of a block that each group leaves empty, in the order of `groups`.

        For a `StateSpec`: bytes that a state leaves empty in its last block.
        """
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
        """Groups that have a block table; without any, one of full attention with `block_size`."""
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
        """True if hashed blocks and stored blocks differ, as with several groups, windows, states or a CPU pool."""
        groups = self.layer_groups
        return len(groups) > 1 or self.has_states or groups[0].sliding_window > 0 or self.cpu.num_blocks > 0

    @property
    def max_servable_tokens(self) -> int:
        """Length of the longest sequence that fits the pool alone, at most `max_model_len`. O(log)."""
        usable = self.num_blocks - 1 - self.watermark_blocks
        return bisect_right(range(1, self.max_model_len + 1), usable, key=self._num_least_blocks)

    def _num_least_blocks(self, num_tokens: int) -> int:
        """Return the fewest blocks with which a sequence of `num_tokens` tokens can run."""
        groups = self.layer_groups
        return sum(num_least_blocks(num_tokens, group.sliding_window, group.block_size) for group in groups)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of the block table: blocks of `hash_block_size` tokens for `max_model_len` tokens."""
        return -(-self.max_model_len // self.hash_block_size)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.num_blocks)


#: The fields of `CacheConfig` that are configs themselves.
_PARTS = {"states": StateConfig, "cpu": CPUPoolConfig, "hints": HintConfig, "observe": ObserveConfig}
#: For each option of such a part, the field that has the part.
_PART_OF = {option_name(each): part for part, kind in _PARTS.items() for each in fields(kind)}
#: All options of a cache by name, those of the parts included; `metadata` has what `about` says of each.
CACHE_FIELDS: dict[str, Field[Any]] = {
    option_name(each): each
    for kind in (CacheConfig, *_PARTS.values())
    for each in fields(kind)
    if each.name not in _PARTS
}
#: The options that callers of an engine may set, in `cache_options`.
CACHE_OPTIONS = tuple(sorted(name for name, each in CACHE_FIELDS.items() if each.metadata["engine"]))
#: Those of them that `blockyard generate` and `blockyard serve` have an option for, by the same name.
COMMAND_OPTIONS = tuple(name for name, each in CACHE_FIELDS.items() if each.metadata["command"])


def cache_config(*sizes: Any, **options: Any) -> CacheConfig:
    """Make a `CacheConfig` from options by their names in `CACHE_FIELDS`, as commands and engines have them.

    Args:
        sizes: num_blocks and block_size, as in `CacheConfig`.
        options: fields of `CacheConfig`, and options of its parts: `num_cpu_blocks=100` for
            `cpu=CPUPoolConfig(num_blocks=100)`.

    Raises:
        InvalidArgument: if there is no such option, or `CacheConfig` refuses a value.

    >>> cache_config(1000, track_misses=True).observe.track_misses
    True
    """
    own = {each.name for each in fields(CacheConfig)} | {"num_bytes"}
    given = {name: value for name, value in options.items() if name in own}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name not in own:
            if name not in _PART_OF:
                raise InvalidArgument(f"{name} is {shown(value)}; CacheConfig has no such field")
            parts.setdefault(_PART_OF[name], {})[CACHE_FIELDS[name].name] = value
    try:
        for part, values in parts.items():
            given[part] = replace(given[part], **values) if part in given else _PARTS[part](**values)
        return CacheConfig(*sizes, **given)
    except InvalidArgument as error:
        raise InvalidArgument(_with_option_names(str(error), parts)) from None


def _with_option_names(text: str, parts: dict[str, dict[str, Any]]) -> str:
    """Return an error with the names of options in place of the fields of parts that they stand for."""
    for name, part in _PART_OF.items():
        own = CACHE_FIELDS[name].name
        if own in parts.get(part, {}):
            for path in (f"{part}.{own}", f"{_PARTS[part].__name__}.{own}"):
                if text.startswith(f"{path} "):
                    return name + text.removeprefix(path)
    return text
