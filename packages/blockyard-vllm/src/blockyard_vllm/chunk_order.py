"""An eviction policy for vLLM's CPU tier, with its `CachePolicy` interface. Does not import vLLM.

vLLM reports single chunks as their transfers end, while Blockyard's policies expect whole requests. A `Use` connects
the two: the chunks that one request stored or requested. When the request has finished and their transfers have ended,
the chunks are inserted into the policy, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blockyard import InvalidArgument, InvariantError
from blockyard.policies import make_policy

#: One less than the most blocks of a pool.
MAX_CHUNKS = 2**27 - 1
#: A prime below 2**62, the limit of policies' keys; so all bytes of a name count.
_KEY_PRIME = 2**61 - 1


class Use:
    """Chunks of one request that are not in the policy.

    Attributes:
        keys: the chunks, each with the position of its last token; 0 if vLLM did not give it.
        moving: those in transfer.
        chain: after the request has finished, all its chunks from head to tail, those of several groups by position.
    """

    __slots__ = ("chain", "generation", "has_finished", "keys", "moving", "number", "owner")

    def __init__(self, owner: object, generation: int, number: int) -> None:
        self.owner = owner
        self.generation = generation
        self.number = number
        self.keys: dict[bytes, int] = {}
        self.moving: set[bytes] = set()
        self.chain: list[bytes] = []
        self.has_finished = False


class ChunkOrder:
    """vLLM's `CachePolicy` (0.32 and 0.33) on a Blockyard policy.

    A chunk is in the policy (*idle*), in the `Use` of a request, or, if vLLM moves it without a request, in neither
    until the transfer ends. `evict` takes the policy's choice. If the policy is empty, it takes chunks of running
    requests, from the oldest request's last chunk on.

    Each call is O(1) per chunk plus the policy's cost. Memory is about 330 bytes per chunk, without the policy. A
    custom policy must not raise: its exception passes through in the middle of a call and leaves the order unusable.

    Args:
        cache_capacity: chunks of the tier.
        policy: a name, or anything that `BlockPool(eviction_policy=)` accepts.

    Raises:
        InvalidArgument: for a capacity that is not an int from 0 to 2**27 - 1, or an unknown policy.
        PolicyError: if constructing the policy fails.
        NotEnoughMemory: if its arrays cannot be allocated.
    """

    def __init__(self, cache_capacity: int, policy: object = "lru") -> None:
        if type(cache_capacity) is not int or not 0 <= cache_capacity <= MAX_CHUNKS:
            raise InvalidArgument(f"cache_capacity is {cache_capacity!r}; it must be an integer from 0 to {MAX_CHUNKS}")
        self.cache_capacity = cache_capacity
        self.policy = make_policy(policy, max(cache_capacity, 1) + 1)
        self._generation = 0
        self._num_uses = 0
        self._clear_all()

    def _clear_all(self) -> None:
        self._chunks: dict[bytes, Any] = {}
        #: The chunk in each of the policy's blocks. Block numbers are chunk numbers plus one.
        self._key_of: dict[int, bytes] = {}
        self._evictable: set[bytes] = set()
        self._idle: set[bytes] = set()
        self._use_of: dict[bytes, Use] = {}
        #: Uses that have keys, oldest first.
        self._uses: dict[int, Use] = {}
        #: Keys whose hit was counted when a transfer began, before vLLM named the request.
        self._counted: set[bytes] = set()
        #: Number of chunks before each chunk that is idle or in transfer without a request.
        self._depth: dict[bytes, int] = {}
        #: Fewest tokens between two chunks of a request; 0 while unknown.
        self._chunk_tokens = 0
        #: Holds the chunks that vLLM 0.32 stores; it does not name their request.
        self._no_use = Use(self, self._generation, 0)

    # vLLM's interface.

    def get(self, key: bytes) -> Any | None:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        """Add a chunk that is about to be written.

        Raises:
            InvalidArgument: for a chunk outside the tier.
        """
        if not 0 <= chunk.chunk_id < max(self.cache_capacity, 1):
            raise InvalidArgument(f"chunk_id is {chunk.chunk_id}; the tier has {self.cache_capacity} chunks")
        if key in self._chunks or chunk.chunk_id + 1 in self._key_of:
            raise InvalidArgument(f"chunk {chunk.chunk_id} or its key is already in the tier")
        self._chunks[key] = chunk
        self._key_of[chunk.chunk_id + 1] = key
        if req_context is None:
            self._join(key, self._no_use, 0)
        else:
            self._join(key, self._use(req_context), req_context.get_offload_key_position(key) or 0)
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: bytes) -> None:
        """Remove a chunk that could not be written."""
        if key in self._idle:
            self._take(key)
        self._drop(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Count one more use of these chunks, from head to tail, by a request that does not hold them."""
        idle = [key for key in dict.fromkeys(keys) if key in self._idle]
        for key in idle:
            self._hit(key)
        self._insert(idle)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Do nothing: a policy learns of contents when they become idle."""

    def on_request_access(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record a request's first use of these chunks. If possible they stay until it has finished."""
        use = self._use(req_context)
        for key in keys:
            if key in self._chunks and self._use_of.get(key) is not use:
                self._access(key, use, req_context)

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: set[bytes], reused_keys: set[bytes],
        req_context: Any,
    ) -> None:  # fmt: skip
        """Record all chunks that a request used, from head to tail. They return to the policy after their transfers."""
        use = self._use(req_context)
        self._order(use, [key for group in key_groups for key in group], req_context)
        for key in use.chain:
            if key in self._chunks and self._use_of.get(key, self._no_use) is self._no_use:
                self._access(key, use, req_context, is_hit=key in reused_keys)
        use.has_finished = True
        self._release(use)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Drop `n` unprotected chunks and return them. None, and no change, if there are fewer."""
        if len(self._evictable) - len(protected & self._evictable) < n:
            return None
        kept = [key for key in protected if key in self._idle]
        kept.sort(key=self._depth.__getitem__)
        for key in kept:
            self._take(key)
        victims: list[bytes] = []
        while len(victims) < n and self._idle:
            victim = self._key_of[int(self.policy.evict())]
            self._idle.remove(victim)
            victims.append(victim)
        victims += self._last_resort(n - len(victims), protected)
        evicted = [(key, self._chunks[key]) for key in victims]
        for key in victims:
            self._drop(key)
        self._insert(kept)
        return evicted

    def clear(self) -> None:
        """Drop everything, used or not."""
        self.policy.clear()
        self._generation += 1
        self._clear_all()

    def mark_evictable(self, key: bytes) -> None:
        """Record the end of a chunk's last transfer."""
        self._evictable.add(key)
        use = self._use_of.get(key)
        if use is None:
            self._insert([key])
            return
        use.moving.discard(key)
        self._release(use)

    def mark_non_evictable(self, key: bytes) -> None:
        """Record the start of a chunk's transfer."""
        self._evictable.discard(key)
        use = self._use_of.get(key)
        if use is not None:
            use.moving.add(key)
        elif key in self._idle:
            self._hit(key)
            self._counted.add(key)

    def check(self) -> None:
        """Raise `InvariantError` if the records disagree. O(chunks)."""
        self.policy.check()
        used = {key: use for use in self._uses.values() for key in use.keys}
        if used != self._use_of or any(not use.keys for use in self._uses.values()):
            raise InvariantError(f"{len(used)} chunks are used by requests, {len(self._use_of)} are counted")
        if sorted(self._key_of.items()) != sorted((chunk.chunk_id + 1, key) for key, chunk in self._chunks.items()):
            raise InvariantError(f"{len(self._key_of)} blocks are taken for {len(self._chunks)} chunks")
        ready = {key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0}
        if ready != self._evictable or self._idle != self._evictable - self._use_of.keys():
            raise InvariantError(f"{len(ready)} chunks can be evicted, {len(self._evictable)} are counted")
        for use in self._uses.values():
            if use.moving != use.keys.keys() - ready or (use.has_finished and not use.moving):
                raise InvariantError(f"use {use.number} waits for {len(use.moving)} transfers that do not run")

    # Requests.

    def _use(self, req_context: Any) -> Use:
        """Return the request's use, or a new one if it has none or the cache was cleared since."""
        use = req_context.get_state(Use)
        if use is None or use.owner is not self or use.generation != self._generation or use.has_finished:
            self._num_uses += 1
            use = Use(self, self._generation, self._num_uses)
            req_context.set_state(use)
        return use  # type: ignore[no-any-return]

    def _access(self, key: bytes, use: Use, req_context: Any, *, is_hit: bool = True) -> None:
        """Record a request's first use of a chunk. The chunk stays with a younger request that uses it too."""
        if key in self._counted:
            self._counted.remove(key)
        elif is_hit:
            self._hit(key)
        if key in self._idle:
            self._take(key)
        owner = self._use_of.get(key)
        if owner is None or owner.has_finished or owner.number < use.number:
            self._leave(key)
            self._join(key, use, req_context.get_offload_key_position(key) or 0)

    def _hit(self, key: bytes) -> None:
        """Count a hit, and remove the chunk from the policy if it was idle."""
        self.policy.hit(self._block(key), _number(key))
        if key in self._idle:
            self._take(key)

    def _take(self, key: bytes) -> None:
        self._idle.remove(key)
        self.policy.remove(self._block(key))

    def _join(self, key: bytes, use: Use, end: int) -> None:
        self._use_of[key] = use
        use.keys[key] = end
        self._uses.setdefault(use.number, use)
        if key not in self._evictable:
            use.moving.add(key)

    def _leave(self, key: bytes) -> None:
        """Remove a chunk from its request's use, if any."""
        use = self._use_of.pop(key, None)
        if use is None:
            return
        del use.keys[key]
        use.moving.discard(key)
        if not use.keys:
            del self._uses[use.number]
        self._release(use)

    def _drop(self, key: bytes) -> None:
        self._leave(key)
        del self._key_of[self._block(key)]
        del self._chunks[key]
        self._evictable.discard(key)
        self._counted.discard(key)
        self._depth.pop(key, None)

    def _last_resort(self, n: int, protected: set[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for use in self._uses.values():
            for key in sorted(use.keys, key=use.keys.__getitem__)[::-1]:
                if len(found) == n:
                    return found
                if key not in use.moving and key not in protected:
                    found.append(key)
        return found

    # Returning chunks to the policy.

    def _release(self, use: Use) -> None:
        """Return the request's chunks to the policy if it has finished and none is in transfer."""
        if not use.has_finished or use.moving or not use.keys:
            return
        del self._uses[use.number]
        keys, use.keys = use.keys, {}
        for key in keys:
            del self._use_of[key]
        known = set(use.chain)
        self._insert([key for key in keys if key not in known])
        self._insert([key for key in use.chain if key in keys])

    def _insert(self, keys: list[bytes]) -> None:
        """Make chunks idle, the last one first."""
        for key in reversed(keys):
            self.policy.insert(self._block(key), _number(key), self._depth.setdefault(key, 0))
            self._idle.add(key)

    def _order(self, use: Use, keys: list[bytes], req_context: Any) -> None:
        """Set the use's chain from head to tail. If vLLM knows the positions, a chain may begin in mid-prompt."""
        places = [req_context.get_offload_key_position(key) for key in keys]
        ends = [end for end in places if end is not None]
        if len(ends) < len(keys) or not keys:
            ends = list(range(1, len(keys) + 1))
            chunk_tokens = 1
        else:
            order = sorted(range(len(keys)), key=ends.__getitem__)
            keys, ends = [keys[place] for place in order], [ends[place] for place in order]
            chunk_tokens = self._infer_chunk_tokens(ends)
        use.chain = keys
        before = (ends[0] - 1) // chunk_tokens if ends else 0
        for place, key in enumerate(keys):
            if key in self._chunks:
                self._depth[key] = before + place

    def _infer_chunk_tokens(self, ends: list[int]) -> int:
        """Return the tokens per chunk, inferred from requests whose first two chunks are known."""
        distinct = sorted(set(ends[:1] + [end for end in ends if end > ends[0]][:1]))
        if len(distinct) == 2 and distinct[1] == 2 * distinct[0]:
            self._chunk_tokens = min(self._chunk_tokens or distinct[0], distinct[0])
        return self._chunk_tokens or ends[0]

    def _block(self, key: bytes) -> int:
        return int(self._chunks[key].chunk_id) + 1


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big") % _KEY_PRIME
