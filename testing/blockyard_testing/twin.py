"""What a call did and all that a manager shows, as plain values, so that two builds of the package can be compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

Record = tuple[Any, ...]


def outcome(call: Callable[[], object]) -> Record:
    """What a call returned, or the type's name and message of what it raised."""
    try:
        return ("returned", plain(call()))
    except Exception as error:
        cause = type(error.__cause__).__name__
        return ("raised", type(error).__name__, str(error), cause, vars(error))


def plain(value: object) -> object:
    """Arrays as lists with their type, plans and statistics as dictionaries."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "num_scheduled"):
        own = {name: plain(getattr(value, name)) for name in PLAN}
        return own | {name: [plain(getattr(group, name)) for group in value.groups] for name in OF_GROUPS}
    if hasattr(value, "num_prompt_tokens"):
        return {name: plain(getattr(value, name)) for name in STATS}
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


PLAN = (
    "status",
    "fits",
    "all_fit",
    "num_scheduled",
    "query_start_loc",
    "seq_lens",
    "num_computed",
    "copies",
    "step",
)
OF_GROUPS = ("slot_mapping", "block_tables", "indptr", "indices", "last_page_len")
STATS = (
    "num_prompt_tokens",
    "num_hit_tokens",
    "num_evicted_blocks",
    "num_copied_blocks",
    "peak_used_blocks",
    "num_free_blocks",
    "num_used_blocks",
    "num_cached_blocks",
    "num_running_seqs",
    "num_wasted_slots",
    "hit_rate",
)


def whole_state(cache: Any, seqs: list[int]) -> Record:
    """Everything a manager shows, down to the hash of each block."""
    pool = cache.pool
    return (
        plain(cache.stats()),
        cache.usage,
        pool.free_block_ids().tolist(),
        pool.ref_counts().tolist(),
        pool.cached_mask().tolist(),
        pool.states().tolist(),
        [
            (cache.num_tokens(s), cache.num_computed_tokens(s), plain(cache.token_ids(s)), plain(cache.block_ids(s)))
            for s in seqs
        ],
        [repr(cache.block(b)) + str(cache.block(b).block_hash) for b in range(pool.num_blocks)],
    )


def count_handles_from_the_start(package: ModuleType) -> None:
    """Handles are unique in a process; here each program is to see the same ones on both builds."""
    importlib.import_module(f"{package.__name__}.core.sequences.table")._SHARES.last = 0


#: What no call takes for tokens.
NO_TOKENS: list[Any] = [
    [-1],
    [2**31],
    [2**63],
    [2**64],
    [-(2**63)],
    [1.5],
    ["a"],
    [None],
    [[1]],
    [1, [2]],
    "tokens",
    None,
    1.5,
    0,
    -1,
    2**63,
    2**70,
    {1: 2},
    {1},
    object,
    np.array([1.0]),
    np.array([[1]]),
    np.array(1),
    np.array(["a"]),
    np.array([None]),
    np.array([2**63], dtype=np.uint64),
    np.array([-1], dtype=np.int8),
    np.array([2**63 - 1]),
]

#: What no call takes for a number, or for one of each sequence.
NO_NUMBERS: list[Any] = [
    -1,
    2**62,
    2**63,
    -(2**63) - 1,
    2**70,
    1.5,
    "tokens",
    b"tokens",
    {1: 2},
    {1},
    object,
    [-1],
    [2**63],
    [1.5],
    ["a"],
    [None],
    [1, [2]],
    np.array([1.0]),
    np.array([-1], dtype=np.int8),
    np.array([2**63], dtype=np.uint64),
    np.array([None]),
    np.array([[1, 2], [3, 4]]),
    range(3),
]


def refused_calls(cache: Any, live: list[int], tokens: Any, number: Any) -> list[Callable[[], object]]:
    """Calls with tokens and numbers that no call takes."""
    one = live[0] if live else 1
    return [
        lambda: cache.allocate(tokens),
        lambda: cache.can_allocate(tokens),
        lambda: cache.reserve([one], number),
        lambda: cache.commit([one], number),
        lambda: cache.commit([one], 2**20),
        lambda: cache.commit([one], 0, [[1], [2]]),
        lambda: cache.fork(one, number),
        lambda: cache.truncate(one, number),
        lambda: cache.free(number),
        lambda: cache.free([*live, one]),
    ]


def refused_handles(cache: Any, live: list[int], dead: int) -> list[Callable[[], object]]:
    """Calls with the handle of a sequence that has ended, or never was."""
    if dead in live:
        return []
    return [
        lambda: cache.num_tokens(dead),
        lambda: cache.free(dead),
        lambda: cache.free([*live, dead]),
        lambda: cache.reserve([*live, dead], 1),
        lambda: cache.fork(dead, 1),
        lambda: cache.truncate(dead, 1),
    ]
