"""Options of a cache that belong together, as parts of `CacheConfig`: states, CPU pool, hints, observation."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from .arguments import require_bool, require_int, shown
from .errors import InvalidArgument

MAX_BLOCKS = 2**27
MAX_MODEL_LEN = 2**27
MAX_HISTORY = 2**24
MAX_SESSIONS = 2**20
#: Rules that place checkpoints of states (`core/policies/states/checkpoint_rules`), beside "every:N".
CHECKPOINT_RULES = ("last", "branch", "ends", "pow2")
#: Orders in which checkpoints of states are evicted (`core/policies/states/orders`).
STATE_ORDERS = ("index", "lru")


def about(
    line: str, low: int = 0, high: int = 0, *, option: str = "", engine: bool = False, command: bool = False
) -> dict[str, object]:
    """Return the metadata of a field: its limits, and what commands need to make an option of it.

    Args:
        line: help text of the option.
        low: smallest value of an integer.
        high: largest value of an integer; 0 for fields of other types.
        option: name of the option, in commands and in `cache_options` of an engine; the field's if empty.
        engine: whether `cache_options` may have it. All other fields follow from arguments of the engine.
        command: whether `blockyard generate` and `blockyard serve` have the option.
    """
    return {"help": line, "low": low, "high": high, "option": option, "engine": engine or command, "command": command}


def option_name(each: Field[Any]) -> str:
    """Return the name of the option that a field stands for."""
    name: str = each.metadata["option"] or each.name
    return name


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the booleans and integers of a config by their metadata. Raises `InvalidArgument`.

    prefix: what errors put before the name of a field, such as "StateConfig.".
    """
    for each in fields(config):
        name, value = prefix + each.name, getattr(config, each.name)
        if each.type == "bool":
            require_bool(name, value)
        elif each.metadata["high"] and not (value is each.default is None):
            # Stored as plain integers: what is compiled takes no others.
            number = require_int(name, value, each.metadata["low"], each.metadata["high"])
            object.__setattr__(config, each.name, number)


def is_checkpoint_rule(name: object) -> bool:
    """Return whether `name` is a rule that places checkpoints."""
    if not isinstance(name, str):
        return False
    rule, _, tokens = name.partition(":")
    is_every = rule == "every" and tokens.isascii() and tokens.isdigit() and len(tokens) < 10
    return name in CHECKPOINT_RULES or (is_every and 1 <= int(tokens) <= MAX_MODEL_LEN)


def require_checkpoint_rules(name: str, rules: object) -> None:
    """Raise `InvalidArgument` unless `rules` is a tuple of rules that place checkpoints."""
    if not isinstance(rules, tuple) or not all(map(is_checkpoint_rule, rules)):
        raise InvalidArgument(
            f"{name} is {shown(rules)}; it must be a tuple of names of {', '.join(CHECKPOINT_RULES)}, or every:N "
            f"with N from 1 to {MAX_MODEL_LEN}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """Which states of a hybrid model are checkpointed, and which are evicted first (docs/states.md).

    Args:
        checkpoints: rules that place checkpoints: "last", "branch", "ends", "pow2", "every:N". `StateHints` adds
            positions for one prompt.
        order: which checkpoint is evicted first: "index" (least expected benefit per byte, learned) or "lru". Keys and
            values that no checkpoint follows are evicted before all of them.
        cut_chunks: whether `reserve` ends a sequence's tokens at the first position to checkpoint, because the kernel
            returns the state only at the end of a chunk. False for kernels that also return states inside a chunk.
    """

    checkpoints: tuple[str, ...] = field(
        default=("branch", "ends", "pow2"),
        metadata=about("rules that place checkpoints of states", option="state_checkpoints", engine=True),
    )
    order: str = field(
        default="index",
        metadata=about(f"which state goes first: {', '.join(STATE_ORDERS)}", option="state_order", engine=True),
    )
    cut_chunks: bool = field(default=True, metadata=about("end a step's tokens where a state is checkpointed"))

    def __post_init__(self) -> None:
        check_fields(self, "StateConfig.")
        require_checkpoint_rules("StateConfig.checkpoints", self.checkpoints)
        if self.order not in STATE_ORDERS:
            raise InvalidArgument(
                f"StateConfig.order is {shown(self.order)}; it must be one of {', '.join(STATE_ORDERS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUPoolConfig:
    """A pool of blocks in CPU memory, below the GPU's.

    With a CPU pool, equal prompts that arrive together do not share blocks before they are computed.

    Args:
        num_blocks: blocks that sequences are swapped out to, the null block included; 2 to 2**27, 0 for no CPU pool.
        keep_evicted: whether the CPU pool also keeps blocks that the GPU pool evicts, for later hits.
    """

    num_blocks: int = field(default=0, metadata=about("blocks of a CPU pool", 0, MAX_BLOCKS, option="num_cpu_blocks"))
    keep_evicted: bool = field(
        default=True, metadata=about("keep in the CPU pool what the pool evicts, for later hits", engine=True)
    )

    def __post_init__(self) -> None:
        check_fields(self, "CPUPoolConfig.")
        if self.num_blocks == 1:
            require_int("CPUPoolConfig.num_blocks", self.num_blocks, 2, MAX_BLOCKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintConfig:
    """Limits on what callers can say about future use: `KVCacheManager.retain` and `hint`.

    Args:
        retention_blocks: blocks that `retain` may protect from eviction at a time; 0 turns retention off.
        max_sessions: sessions that `hint` knows at a time, 0 to 2**20. If there are more, the least recently used one
            is forgotten. 0 refuses every hint.
    """

    retention_blocks: int = field(default=0, metadata=about("blocks that may be retained", 0, MAX_BLOCKS, command=True))
    max_sessions: int = field(
        default=65_536, metadata=about("sessions that are known at a time", 0, MAX_SESSIONS, engine=True)
    )

    def __post_init__(self) -> None:
        check_fields(self, "HintConfig.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Records that a cache keeps about itself. Each costs time or memory and is off by default.

    Args:
        track_misses: whether every token that was not hit gets a cause (`KVCacheManager.miss_causes`).
        history_size: events that `history` remembers; 0 for none.
        residency_sample: follow every n-th block from allocation to eviction (`residency`); 0 for none.
        enable_kv_cache_events: whether `take_events` returns which blocks were cached and removed.
    """

    track_misses: bool = field(default=False, metadata=about("count tokens that were not hit, by cause", command=True))
    history_size: int = field(default=0, metadata=about("events of the pool to remember", 0, MAX_HISTORY, command=True))
    residency_sample: int = field(
        default=0,
        metadata=about("measure how long every N-th block lives and lies idle", 0, MAX_BLOCKS, command=True),
    )
    enable_kv_cache_events: bool = field(default=False, metadata=about("note what can be hit, for `take_events`"))

    def __post_init__(self) -> None:
        check_fields(self, "ObserveConfig.")
