"""A tier with the calls that vLLM's offloading manager makes of its `CachePolicy`, for tests without vLLM.

Requests overlap, transfers end in any order, and stores fail. What the policy answers is compared with plain books.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


class Chunk:
    """As vLLM's: ref_cnt -1 until it is written, then the transfers that read it."""

    def __init__(self, chunk_id: int) -> None:
        self.chunk_id, self.ref_cnt = chunk_id, -1


class Context:
    """A request, with the place of each key's last token and room for what a policy keeps with it."""

    def __init__(self, ends: dict[bytes, int]) -> None:
        self._ends, self._state = ends, {}

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._ends.get(key)

    def get_state(self, kind: type) -> Any:
        return self._state.get(kind)

    def set_state(self, value: Any) -> None:
        self._state[type(value)] = value


@dataclass
class Access:
    """What vLLM's manager collects for a request until it has finished."""

    context: Context
    keys: list[bytes]
    seen: dict[bytes, None] = field(default_factory=dict)
    inserted: set[bytes] = field(default_factory=set)
    reused: set[bytes] = field(default_factory=set)


class SmallTier:
    """The manager. tells_of_access: 0.33 does, and says for which request a chunk is stored; 0.32 does not."""

    def __init__(self, policy: Any, num_chunks: int, tells_of_access: bool = True) -> None:
        self.policy = policy
        self.tells_of_access = tells_of_access
        self.free = list(range(num_chunks))
        self.chunks: dict[bytes, Chunk] = {}
        #: Transfers that have begun: whether it is a store, and its keys.
        self.transfers: list[tuple[bool, list[bytes]]] = []
        self.num_evicted = 0

    def begin(self, keys: list[bytes], chunk_tokens: int | None = 16) -> Access:
        ends = {} if chunk_tokens is None else {key: chunk_tokens * (n + 1) for n, key in enumerate(keys)}
        return Access(Context(ends), keys)

    def num_ready(self, keys: list[bytes]) -> int:
        for place, key in enumerate(keys):
            chunk = self.policy.get(key)
            assert chunk is self.chunks.get(key)
            if chunk is None or chunk.ref_cnt < 0:
                return place
        return len(keys)

    def load(self, access: Access, keys: list[bytes]) -> None:
        for key in keys:
            chunk = self.chunks[key]
            if chunk.ref_cnt == 0:
                self.policy.mark_non_evictable(key)
            chunk.ref_cnt += 1
        self._record(access, keys)
        access.reused.update(key for key in keys if key not in access.inserted)
        self.transfers.append((False, keys))

    def store(self, access: Access, keys: list[bytes]) -> bool:
        """Store chunks; return whether there was room."""
        missing = [key for key in keys if key not in self.chunks]
        ready = [key for key in keys if key in self.chunks and self.chunks[key].ref_cnt >= 0]
        self.policy.on_store_miss(missing, access.context)
        self._record(access, [key for key in keys if key in {*missing, *ready}])
        access.reused.update(key for key in ready if key not in access.inserted)
        if not self._make_room(len(missing) - len(self.free), set(keys)):
            return False
        for key in missing:
            self.chunks[key] = Chunk(self.free.pop())
            given = (access.context,) if self.tells_of_access else ()
            self.policy.insert(key, self.chunks[key], *given)
        access.inserted.update(missing)
        if missing:
            self.transfers.append((True, missing))
        return True

    def _make_room(self, lacking: int, protected: set[bytes]) -> bool:
        if lacking <= 0:
            return True
        can_go = {key for key, chunk in self.chunks.items() if chunk.ref_cnt == 0} - protected
        evicted = self.policy.evict(lacking, protected)
        assert (evicted is None) == (len(can_go) < lacking)
        if evicted is None:
            return False
        assert len(evicted) == lacking == len(dict(evicted))
        for key, chunk in evicted:
            assert key in can_go
            assert self.chunks.pop(key) is chunk
            self.free.append(chunk.chunk_id)
        self.num_evicted += lacking
        return True

    def end_transfer(self, number: int, succeeds: bool = True) -> None:
        is_store, keys = self.transfers.pop(number)
        for key in keys:
            chunk = self.chunks[key]
            if is_store and not succeeds:
                self.policy.remove(key)
                self.free.append(self.chunks.pop(key).chunk_id)
                continue
            chunk.ref_cnt = 0 if is_store else chunk.ref_cnt - 1
            if chunk.ref_cnt == 0:
                self.policy.mark_evictable(key)

    def finish(self, access: Access) -> None:
        keys = [key for key in access.keys if key in access.seen]
        groups = [[key for key in keys if key[-4:] == group] for group in sorted({key[-4:] for key in keys})]
        self.policy.on_request_finished(groups, access.inserted - access.reused, access.reused, access.context)

    def clear(self, num_chunks: int) -> None:
        self.policy.clear()
        self.chunks, self.transfers, self.free = {}, [], list(range(num_chunks))

    def _record(self, access: Access, keys: list[bytes]) -> None:
        new = [key for key in keys if key not in access.seen]
        access.seen.update(dict.fromkeys(new))
        if new and self.tells_of_access:
            self.policy.on_request_access(new, access.context)


def name_of(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def prompts_of(draw: random.Random, count: int, num_groups: int) -> list[list[bytes]]:
    """Chains with common beginnings; with several groups, each place has a key for each.

    No prompt has a key twice, as none of vLLM's has: its names are chained.
    """
    heads = [draw.sample(range(10**6), draw.randint(1, 6)) for _ in range(4)]
    prompts = [draw.choice(heads) + draw.sample(range(10**6, 2 * 10**6), draw.randint(0, 5)) for _ in range(count)]
    return [[name_of(number, group) for number in prompt for group in range(num_groups)] for prompt in prompts]
