"""One seeded program, run on any build of the package; what it saw is returned as plain values.

The program chooses by what the manager shows, so two builds that behave alike take the same way, and a first
difference is where they part.
"""

from __future__ import annotations

import array
import importlib
import random
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
    if hasattr(value, "slot_mapping"):
        return {name: plain(getattr(value, name)) for name in PLAN}
    if hasattr(value, "num_prompt_tokens"):
        return {name: plain(getattr(value, name)) for name in STATS}
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


PLAN = (
    "status",
    "fits",
    "all_fit",
    "num_scheduled",
    "slot_mapping",
    "query_start_loc",
    "seq_lens",
    "num_computed",
    "block_tables",
    "indptr",
    "indices",
    "last_page_len",
    "copies",
    "step",
)
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
    importlib.import_module(f"{package.__name__}.core.sequences.serials")._SHARES.last = 0


class Program:
    """A random walk over the manager's calls, hostile ones included."""

    def __init__(self, package: ModuleType, seed: int) -> None:
        self.package = package
        count_handles_from_the_start(package)
        self.random = random.Random(seed)
        choose = self.random
        self.block_size = choose.choice((1, 2, 3, 4, 16))
        self.config = package.CacheConfig(
            choose.randint(2, 40),
            self.block_size,
            max_num_seqs=choose.randint(1, 6),
            max_model_len=choose.randint(1, 8) * self.block_size,
            enable_prefix_caching=choose.random() < 0.8,
            watermark=choose.choice((0.0, 0.1)),
            hash_seed=choose.randrange(2**62),
        )
        self.cache = package.KVCacheManager(self.config)
        self.seqs: list[int] = []
        self.reserved: dict[int, int] = {}
        self.dead = [0, 1 << 20, 3]
        self.records: list[Record] = []

    def run(self, num_calls: int) -> list[Record]:
        """The outcome of every call, each with the state after it."""
        actors = [self.allocate, self.step, self.commit, self.fork, self.truncate, self.free, self.reset, self.abuse]
        for _ in range(num_calls):
            actor = self.random.choices(actors, (8, 10, 8, 3, 3, 4, 0.3, 3))[0]
            self.note(actor.__name__, outcome(actor))
        return self.records

    def note(self, name: str, result: Record) -> None:
        self.records.append((name, result, whole_state(self.cache, self.seqs)))

    def keys(self) -> tuple[Any, ...]:
        lora, salt = self.package.LoRA("a"), self.package.CacheSalt("a")
        return self.random.choice(((), (), (), (lora,), (salt,), (lora, salt), (salt, lora)))

    def prompt(self) -> Any:
        choose = self.random
        tokens = [1] * choose.randint(0, 3 * self.block_size) + [choose.randint(1, 2) for _ in range(self.block_size)]
        form = choose.randrange(5)
        if form == 0:
            return tokens
        if form == 1:
            return array.array("i", tokens)
        if form == 2:
            return memoryview(array.array("q", tokens))
        return np.array(tokens, dtype=(np.int32, np.int64)[form - 3])

    def allocate(self) -> Record:
        prompt, keys = self.prompt(), self.keys()
        answer = self.cache.can_allocate(prompt, keys).name
        seq = self.cache.allocate(prompt, "someone", keys)
        self.seqs.append(seq)
        return (answer, seq)

    def batch(self) -> list[int]:
        return self.random.sample(self.seqs, self.random.randint(0, len(self.seqs)))

    def step(self) -> Any:
        batch = self.batch()
        plan = self.cache.reserve(batch, [self.random.randint(1, 2 * self.block_size) for _ in batch])
        self.reserved.update(zip(batch, plan.num_scheduled.tolist(), strict=True))
        return plan

    def commit(self) -> None:
        batch = self.batch()
        computed = [self.random.choice((0, self.reserved.get(s, 0), self.reserved.get(s, 0))) for s in batch]
        missing = [
            max(0, self.cache.num_computed_tokens(s) + n - self.cache.num_tokens(s))
            for s, n in zip(batch, computed, strict=True)
        ]
        width = max([1, *missing])
        tokens = [[1] * lack + [-1] * (width - lack) for lack in missing]
        self.cache.commit(batch, computed, np.array(tokens, dtype=np.int32).reshape(-1, width))
        self.reserved.update(dict.fromkeys(batch, 0))

    def fork(self) -> list[int]:
        children: list[int] = self.cache.fork(self.one(), self.random.randint(0, 2))
        self.seqs += children
        return children

    def one(self) -> int:
        return self.random.choice([*self.seqs, self.random.choice(self.dead)])

    def truncate(self) -> None:
        self.cache.truncate(self.one(), self.random.randint(-1, 3 * self.block_size))

    def free(self) -> None:
        batch = self.batch()
        if self.random.random() < 0.1:
            batch.append(self.random.choice(self.dead))
        self.cache.free(batch)
        for seq in batch:
            self.seqs.remove(seq)
            self.dead.append(seq)

    def reset(self) -> None:
        self.cache.reset_prefix_cache()

    def abuse(self) -> list[Record]:
        """Calls with arguments that are no good, one after another."""
        cache, seq = self.cache, self.one()
        bad = self.random.choice(BAD_VALUES)
        return [
            outcome(lambda: cache.allocate(bad)),
            outcome(lambda: cache.can_allocate(bad)),
            outcome(lambda: cache.reserve(bad, 1)),
            outcome(lambda: cache.reserve([seq], bad)),
            outcome(lambda: cache.commit([seq], bad)),
            outcome(lambda: cache.commit([seq], 0, bad)),
            outcome(lambda: cache.free(bad)),
            outcome(lambda: cache.num_tokens(bad)),
            outcome(lambda: cache.fork(seq, bad)),
            outcome(lambda: cache.truncate(seq, bad)),
            outcome(lambda: self.package.CacheConfig(bad)),
            outcome(lambda: self.package.CacheConfig(8, bad)),
            outcome(lambda: self.package.BlockPool(bad).num_blocks),
        ]


BAD_VALUES: list[Any] = [
    [],
    [-1],
    [2**31],
    [2**63],
    [2**64],
    [1.5],
    ["a"],
    [None],
    [True],
    [[1]],
    [1, [2]],
    "tokens",
    b"tokens",
    None,
    1.5,
    True,
    0,
    -1,
    2**31,
    2**62,
    2**63,
    -(2**63) - 1,
    2**70,
    {1: 2},
    {1},
    object,
    np.array([], dtype=np.float64),
    np.array([1.0]),
    np.array([True]),
    np.array([[1]]),
    np.array(1),
    np.array(["a"]),
    np.array([None]),
    np.array([2**63], dtype=np.uint64),
    np.array([-1], dtype=np.int8),
    np.array([2**63 - 1]),
    [-(2**63)],
    np.int64(1),
    np.array([[1, 2], [3, 4]]),
    (1, 2),
    range(3),
]


def run_program(package: ModuleType, seed: int, num_calls: int) -> list[Record]:
    """What the program of this seed sees on this build."""
    return Program(package, seed).run(num_calls)
