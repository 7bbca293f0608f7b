"""A `BlockPool` that is asked with plain values, so that two builds, or a build and the model, can be compared.

Leases and lookups are known by their numbers, in the order in which they were handed out.
"""

from __future__ import annotations

import contextlib
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
        found = self.pool.find_cached_blocks(tokens, self.keys(keys))
        self.found.append(found)
        return [found.block_ids.tolist(), found.num_tokens, found.num_idle]

    def hold(self, found: int, count: int | None, extend_by: int) -> list[int]:
        return self._add(self.pool.hold(self.found[found], "", count, extend_by))

    def get_cached(self, tokens: list[int], keys: tuple[Any, ...]) -> list[int]:
        return self._add(self.pool.get_cached_blocks(tokens, self.keys(keys)))

    def get_cached_last(self, tokens: list[int], keys: tuple[Any, ...]) -> list[int] | None:
        lease = self.pool.get_cached_block(tokens, self.keys(keys))
        return None if lease is None else self._add(lease)

    def cache_full(self, lease: int, tokens: list[int], num_cached: int, keys: tuple[Any, ...]) -> None:
        self.pool.cache_full_blocks(self.leases[lease], tokens, num_cached, self.keys(keys))

    def cache_next(self, lease: int, tokens: list[int], keys: tuple[Any, ...], num_cached: int | None) -> int:
        return self.pool.cache_next_blocks(self.leases[lease], tokens, self.keys(keys), num_cached)

    def touch(self, lease: int, start: int, stop: int | None) -> list[int]:
        return self._add(self.pool.touch(self.leases[lease], "", start, stop))

    def copy_on_write(self, lease: int, position: int) -> tuple[int, int] | None:
        return self.pool.copy_on_write(self.leases[lease], position)

    def free(self, lease: int, last: bool) -> None:
        self.pool.free_blocks(self.leases[lease], last)

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
        return self.pool.retain(tokens, priority, expires_at, self.keys(keys))

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
