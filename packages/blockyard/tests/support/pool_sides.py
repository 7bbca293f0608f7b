"""A `BlockPool` that is asked with plain values, so that two builds, or a build and the model, can be compared.

Leases and lookups are known by their numbers, in the order in which they were handed out.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

Outcome = tuple[str, Any]


def outcome(call: Callable[[], Any]) -> Outcome:
    """What a call returned, or the name of what it raised."""
    try:
        return ("returned", call())
    except Exception as error:
        name = str(error) if type(error).__name__ == "Refused" else type(error).__name__
        return ("raised", name)


class PoolSide:
    """A real pool. Every call is checked by `check()`."""

    def __init__(self, package: ModuleType, num_blocks: int, block_size: int, **settings: Any) -> None:
        self.package = package
        self.pool = package.BlockPool(num_blocks, block_size, **settings)
        self.leases: list[Any] = []
        self.found: list[Any] = []
        #: What was said of lost contents.
        self.lost: list[int] = []
        self.pool.on_evict = lambda ids: self.lost.extend(ids.tolist())
        #: Whether errors are compared by their text too, as between two builds.
        self.told: list[str] = []

    def keys(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        kinds = {"salt": self.package.CacheSalt, "lora": self.package.LoRA, "span": self.package.Span}
        return tuple(kinds[kind](*rest) for kind, *rest in keys)

    def call(self, name: str, *arguments: Any) -> Outcome:
        """The outcome of a call of this class; what an error says is kept in `told`."""

        def run() -> Any:
            with contextlib.ExitStack() as stack:
                stack.callback(self.pool.check)
                try:
                    return getattr(self, name)(*arguments)
                except Exception as error:
                    self.told.append(f"{name}: {error}")
                    raise

        return outcome(run)

    def _add(self, lease: Any) -> list[int]:
        self.leases.append(lease)
        return list(lease)

    def get_new_blocks(self, count: int) -> list[int]:
        return self._add(self.pool.get_new_blocks(count))

    def extend(self, lease: int, count: int) -> list[int]:
        return self.pool.extend(self.leases[lease], count).tolist()

    def find(self, tokens: list[int], keys: tuple[Any, ...]) -> list[Any]:
        found = self.pool.find_cached_blocks(tokens, extra_keys=self.keys(keys))
        self.found.append(found)
        return [found.block_ids.tolist(), found.num_tokens, found.num_idle]

    def hold(self, found: int, count: int | None, extend_by: int) -> list[int]:
        return self._add(self.pool.hold(self.found[found], holder="", num_blocks=count, extend_by=extend_by))

    def get_cached(self, tokens: list[int], keys: tuple[Any, ...]) -> list[int]:
        return self._add(self.pool.get_cached_blocks(tokens, extra_keys=self.keys(keys)))

    def get_cached_last(self, tokens: list[int], keys: tuple[Any, ...]) -> list[int] | None:
        lease = self.pool.get_cached_block(tokens, extra_keys=self.keys(keys))
        return None if lease is None else self._add(lease)

    def cache_full(self, lease: int, tokens: list[int], num_cached: int, keys: tuple[Any, ...]) -> None:
        self.pool.cache_full_blocks(
            self.leases[lease], tokens, num_cached_blocks=num_cached, extra_keys=self.keys(keys)
        )

    def cache_next(self, lease: int, tokens: list[int], keys: tuple[Any, ...], num_cached: int | None) -> int:
        held = self.leases[lease]
        start = held.num_cached_blocks if num_cached is None else num_cached
        return self.pool.cache_next_blocks(held, tokens, start, extra_keys=self.keys(keys))

    def touch(self, lease: int, start: int, stop: int | None) -> list[int]:
        return self._add(self.pool.touch(self.leases[lease], holder="", start=start, stop=stop))

    def copy_on_write(self, lease: int, position: int) -> tuple[int, int] | None:
        return self.pool.copy_on_write(self.leases[lease], position)

    def free(self, lease: int, last: bool) -> None:
        self.pool.free_blocks(self.leases[lease], last=last)

    def release(self, lease: int, start: int, stop: int | None) -> int:
        return self.pool.release(self.leases[lease], start, stop)

    def split(self, lease: int, at: int) -> list[int]:
        return self._add(self.pool.split(self.leases[lease], at))

    def uncache(self, blocks: list[int]) -> int:
        return self.pool.uncache(blocks)

    def adopt(self, blocks: list[int]) -> list[int]:
        return self._add(self.pool.adopt(blocks))

    def evict(self, count: int) -> list[int]:
        return self.pool.evict(count).tolist()

    def retain(self, tokens: list[int], priority: int, expires_at: float | None, keys: tuple[Any, ...]) -> int:
        return self.pool.retain(tokens, priority=priority, expires_at=expires_at, extra_keys=self.keys(keys))

    def advance_time(self, now: float) -> int:
        self.pool.advance_time(now)
        return self.pool.num_retained_blocks

    def resize(self, num_blocks: int) -> str:
        return self.pool.resize(num_blocks).name

    def reset(self) -> None:
        self.pool.reset_prefix_cache()

    def take_events(self) -> list[Any]:
        """Contents that came, as their tokens, and how many went."""
        events = self.pool.take_events()
        came = sorted(events.token_ids.tolist())
        return [events.cleared, came, int((events.contents < 0).sum())]

    def state(self) -> dict[str, Any]:
        pool = self.pool
        live = {lease.serial for lease in pool.leases()}
        return {
            "free": pool.free_block_ids().tolist(),
            "ref_counts": pool.ref_counts().tolist(),
            "cached": pool.cached_mask().tolist(),
            "retained": pool.num_retained_blocks,
            "retiring": pool.num_retiring_blocks,
            "evicted": pool.num_evicted_blocks,
            "peak": pool.peak_used_blocks,
            "allocated": pool.num_allocated_blocks,
            "freed": pool.num_freed_blocks,
            "leases": [
                (lease.block_ids.tolist(), lease.num_cached_blocks, lease.first_block)
                for lease in self.leases
                if lease.serial in live
            ],
            "lost": list(self.lost),
            "idle": [found.num_idle for found in self.found[-3:]],
        }


#: Calls by how often they are drawn.
WEIGHTS = {
    "get_new_blocks": 4,
    "extend": 4,
    "find": 8,
    "hold": 8,
    "get_cached": 3,
    "get_cached_last": 2,
    "cache_full": 4,
    "cache_next": 14,
    "touch": 3,
    "copy_on_write": 2,
    "free": 9,
    "release": 4,
    "split": 3,
    "uncache": 1.5,
    "adopt": 1.5,
    "evict": 1.5,
    "retain": 3,
    "advance_time": 1.5,
    "resize": 1,
    "take_events": 3,
    "reset": 0.3,
}


class PoolWalk:
    """Draws calls by what the first side shows; both sides carry them out."""

    def __init__(self, seed: int, num_blocks: int, block_size: int, sides: list[Any]) -> None:
        self.random = random.Random(seed)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.sides = sides
        #: The tokens that each lease is about, by its number: what a caller knows.
        self.prompts: dict[int, tuple[list[int], tuple[Any, ...]]] = {}
        self.live: list[int] = []
        self.num_leases = self.num_found = 0
        self.found_prompts: list[tuple[list[int], tuple[Any, ...]]] = []
        self.outcomes: dict[str, int] = {}
        self.most_blocks = num_blocks + 6
        self.now = 0.0

    def step(self) -> None:
        """One call on both sides; every answer and the whole state are equal."""
        name = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        drawn = getattr(self, f"draw_{name}")()
        if drawn is None:
            return
        arguments, prompt = drawn
        answers = [side.call(name, *arguments) for side in self.sides]
        what = f"{name}{arguments}"
        assert answers[0] == answers[1], f"{what}: {answers[0]} and {answers[1]}"
        states = [side.state() for side in self.sides]
        for key, value in states[0].items():
            assert value == states[1][key], f"{what}, {key}: {value} and {states[1][key]}"
        self.note(name, arguments, prompt, answers[0])

    def note(self, name: str, arguments: Any, prompt: Any, answer: tuple[str, Any]) -> None:
        key = f"{name} {answer[1] if answer[0] == 'raised' else 'done'}"
        self.outcomes[key] = self.outcomes.get(key, 0) + 1
        if answer[0] == "raised":
            return
        if name == "find":
            self.num_found += 1
            self.found_prompts.append(prompt)
        elif name == "free":
            self.live.remove(arguments[0])
        elif name == "resize":
            self.num_blocks = arguments[0]
        elif name == "advance_time":
            self.now = arguments[0]
        elif name in MAKES_A_LEASE and answer[1] is not None:
            self.prompts[self.num_leases] = prompt
            self.live.append(self.num_leases)
            self.num_leases += 1

    # ------------------------------------------------------------------ what is drawn

    def prompt(self) -> tuple[list[int], tuple[Any, ...]]:
        """Prompts that share beginnings, some with keys and pictures."""
        choose = self.random
        num_tokens = choose.randint(1, 6 * self.block_size)
        turn = choose.randint(0, 3 * self.block_size)
        other = choose.randint(1, 3)
        tokens = [1 if position < turn else other for position in range(num_tokens)]
        keys: list[Any] = choose.choice(([], [], [], [("salt", "a")], [("lora", "b", "")]))
        if choose.random() < 0.3:
            start, length = choose.randint(0, 2 * self.block_size), choose.randint(1, 2 * self.block_size)
            keys = [*keys, ("span", choose.choice("xy"), start, length)]
            if choose.random() < 0.5:
                for position in range(start, min(start + length, num_tokens)):
                    tokens[position] = choose.choice((-1, -7))
        return tokens, tuple(keys)

    def lease(self) -> int | None:
        if self.num_leases and self.random.random() < 0.02:
            return self.random.randrange(self.num_leases)
        return self.random.choice(self.live) if self.live else None

    def count(self, most: int) -> int:
        return self.random.choice((-1, most + 1)) if self.random.random() < 0.03 else self.random.randint(0, most)

    def draw_get_new_blocks(self) -> Any:
        return (self.count(6),), self.prompt()

    def draw_extend(self) -> Any:
        lease = self.lease()
        return None if lease is None else ((lease, self.count(4)), None)

    def draw_find(self) -> Any:
        prompt = self.prompt()
        return prompt, prompt

    def draw_hold(self) -> Any:
        if not self.num_found:
            return None
        found = max(self.random.randrange(self.num_found), self.num_found - self.random.randint(1, 4))
        length = len(self.sides[0].found[found]) if hasattr(self.sides[0].found[found], "__len__") else 6
        count = None if self.random.random() < 0.5 else self.count(length)
        return (found, count, self.count(3)), self.found_prompts[found]

    def draw_get_cached(self) -> Any:
        prompt = self.prompt()
        return prompt, prompt

    draw_get_cached_last = draw_get_cached

    def draw_cache_full(self) -> Any:
        lease = self.lease()
        if lease is None:
            return None
        tokens, keys = self.prompts[lease]
        length, num_cached, _ = self.shape(lease)
        cut = max(1, min(len(tokens), self.random.randint(0, length + 1) * self.block_size + 1))
        num_cached = min(num_cached, cut // self.block_size)
        if self.random.random() < 0.1:
            num_cached = self.count(6)
        return (lease, tokens[:cut], num_cached, keys), None

    def draw_cache_next(self) -> Any:
        lease = self.lease()
        if lease is None:
            return None
        tokens, keys = self.prompts[lease]
        length, num_cached, first_block = self.shape(lease)
        asked = None
        if self.random.random() < 0.3:
            asked = num_cached = self.random.randint(0, num_cached)
        start = (first_block + num_cached) * self.block_size
        longer = [*tokens, *[3] * (8 * self.block_size)]
        room = max(length - num_cached, 0) if self.random.random() < 0.9 else 3
        chunk = longer[start : start + self.random.randint(1, (min(room, 3) + 1) * self.block_size - 1 or 1)]
        if self.random.random() < 0.05:
            chunk = [self.random.randint(-1, 3) for _ in chunk]
        return (lease, chunk, keys, asked), None

    def shape(self, lease: int) -> tuple[int, int, int]:
        """Blocks of a lease, how many of them it has cached, and where it begins."""
        held = self.sides[0].leases[lease]
        return len(held), held.num_cached_blocks, held.first_block

    def draw_touch(self) -> Any:
        lease = self.lease()
        if lease is None:
            return None
        length = self.shape(lease)[0]
        start = self.random.choice((0, 0, self.random.randint(0, length)))
        return (lease, start, self.random.choice((None, self.count(length)))), self.prompts[lease]

    def draw_copy_on_write(self) -> Any:
        lease = self.lease()
        return None if lease is None else ((lease, self.count(self.shape(lease)[0])), None)

    def draw_free(self) -> Any:
        lease = self.lease()
        return None if lease is None else ((lease, self.random.random() < 0.2), None)

    def draw_release(self) -> Any:
        lease = self.lease()
        if lease is None:
            return None
        length = self.shape(lease)[0]
        start = self.random.choice((0, self.random.randint(0, length)))
        return (lease, start, self.random.choice((None, self.count(length), min(start + 1, length)))), None

    def draw_split(self) -> Any:
        lease = self.lease()
        return None if lease is None else ((lease, self.count(self.shape(lease)[0])), self.prompts[lease])

    def ids(self, least: float) -> list[int]:
        """Some ids; one in thirty is no block's."""
        count = self.random.randint(0, 3)
        first = 0 if self.random.random() < least else 1
        return [self.random.randint(first, self.num_blocks - 1 if first else self.num_blocks) for _ in range(count)]

    def draw_uncache(self) -> Any:
        return (self.ids(0.03) if self.num_blocks > 1 else [],), None

    def draw_adopt(self) -> Any:
        blocks = self.ids(0.03) if self.num_blocks > 1 else []
        if self.random.random() < 0.8:
            free = self.sides[0].pool.free_block_ids().tolist()
            blocks = self.random.sample(free, min(len(free), self.random.randint(0, 3)))
        return (blocks,), self.prompt()

    def draw_evict(self) -> Any:
        return (self.count(3),), None

    def draw_retain(self) -> Any:
        tokens, keys = self.prompt()
        ends = self.random.choice((None, self.now - 1, self.now + self.random.randint(0, 6)))
        return (tokens, self.count(3), ends, keys), None

    def draw_advance_time(self) -> Any:
        return (self.now + self.random.choice((-0.5, 0, 1, 2.5)),), None

    def draw_resize(self) -> Any:
        return (self.count(self.most_blocks),), None

    def draw_take_events(self) -> Any:
        return (), None

    def draw_reset(self) -> Any:
        return (), None


MAKES_A_LEASE = {"get_new_blocks", "hold", "get_cached", "get_cached_last", "touch", "split", "adopt"}
