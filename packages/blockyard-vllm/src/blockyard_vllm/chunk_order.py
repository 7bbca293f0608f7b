"""An eviction policy in the place of vLLM's `CachePolicy`: what its CPU tier drops next. No import of vLLM.

vLLM reports single chunks, as their transfers end; a policy of ours expects whole requests, as a pool reports them.
Between the two stands a `Use`: what one request has stored or asked for. Its chunks are with the policy again when the
request has finished and their transfers have ended, from its last chunk to its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blockyard import InvalidArgument, InvariantError
from blockyard.policies import make_policy

#: Chunks of a tier, and one block more, as many as a pool may have.
MAX_CHUNKS = 2**27 - 1
#: A prime below 2**62: keys of policies are below that. All bytes of a name count.
_KEY_PRIME = 2**61 - 1


class Use:
    """Chunks of one request that are not with the policy.

    keys: each with the place of its last token, 0 if vLLM did not say. moving: those that are being transferred. chain:
    once the request has finished, all its keys from head to tail, those of several KV cache groups by their places.
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
    """The methods of vLLM 0.32's and 0.33's `CachePolicy`, on a policy of ours.

    A chunk is in one of three places: with the policy (*idle*), in the `Use` of a request, or, where vLLM moves one
    that no request of it has asked for, in neither until it can be read again. `evict` takes what the policy chooses;
    only if it has none left, what requests that still run use, from the oldest request's last chunk on.

    cache_capacity: chunks of the tier. policy: a name or whatever `BlockPool(eviction_policy=)` takes. O(1) a chunk and
    call, besides the policy's own cost; about 330 bytes a chunk, the policy not counted.

    Raises `InvalidArgument` for a capacity that is no int from 0 to 2**27 - 1 and for an unknown policy, `PolicyError`
    where making one raises, `NotEnoughMemory`. A policy of one's own must not raise: what it raises in the middle of a
    call reaches the caller as it is, and leaves an order that is of no use any more.
    """

    def __init__(self, cache_capacity: int, policy: object = "lru") -> None:
        if type(cache_capacity) is not int or not 0 <= cache_capacity <= MAX_CHUNKS:
            raise InvalidArgument(f"cache_capacity is {cache_capacity!r}; it must be an integer from 0 to {MAX_CHUNKS}")
        self.cache_capacity = cache_capacity
        self.policy = make_policy(policy, max(cache_capacity, 1) + 1)
        self._generation = 0
        self._num_uses = 0
        self._forget_all()

    def _forget_all(self) -> None:
        self._chunks: dict[bytes, Any] = {}
        #: The chunk in each of the policy's blocks, which are the tier's chunks plus one.
        self._key_of: dict[int, bytes] = {}
        self._evictable: set[bytes] = set()
        self._idle: set[bytes] = set()
        self._use_of: dict[bytes, Use] = {}
        #: Uses that have keys, oldest first.
        self._uses: dict[int, Use] = {}
        #: Keys whose hit was told when a transfer began, before vLLM named the request.
        self._told: set[bytes] = set()
        #: How many chunks stand before what is idle or moves alone.
        self._depth: dict[bytes, int] = {}
        #: The fewest tokens between two chunks of a request; 0 until one has shown it.
        self._chunk_tokens = 0
        #: What 0.32 stores: it does not say for which request.
        self._no_use = Use(self, self._generation, 0)

    # What vLLM asks and tells.

    def get(self, key: bytes) -> Any | None:
        """Return the chunk of that name, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        """A chunk was given room; it is written next. Raises `InvalidArgument` for one that the tier does not have."""
        if not 0 <= chunk.chunk_id < max(self.cache_capacity, 1):
            raise InvalidArgument(f"chunk_id is {chunk.chunk_id}; the tier has {self.cache_capacity} chunks")
        if key in self._chunks or chunk.chunk_id + 1 in self._key_of:
            raise InvalidArgument(f"chunk {chunk.chunk_id} or its key is in the tier already")
        self._chunks[key] = chunk
        self._key_of[chunk.chunk_id + 1] = key
        if req_context is None:
            self._join(key, self._no_use, 0)
        else:
            self._join(key, self._use(req_context), req_context.get_offload_key_position(key) or 0)
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: bytes) -> None:
        """A chunk is gone: it could not be written."""
        if key in self._idle:
            self._take(key)
        self._drop(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Note one more use of these, from head to tail, by a request that does not hold them."""
        idle = [key for key in dict.fromkeys(keys) if key in self._idle]
        for key in idle:
            self._hit(key)
        self._insert(idle)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Ignore what the tier does not have: a policy learns of contents when they become idle."""

    def on_request_access(self, keys: Iterable[bytes], req_context: Any) -> None:
        """A request uses these, for the first time. Those that are there stay until it has finished, where possible."""
        use = self._use(req_context)
        for key in keys:
            if key in self._chunks and self._use_of.get(key) is not use:
                self._access(key, use, req_context)

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: set[bytes], reused_keys: set[bytes],
        req_context: Any,
    ) -> None:  # fmt: skip
        """All that a request used, from head to tail. It goes back to the policy when its transfers have ended."""
        use = self._use(req_context)
        self._order(use, [key for group in key_groups for key in group], req_context)
        for key in use.chain:
            if key in self._chunks and self._use_of.get(key, self._no_use) is self._no_use:
                self._access(key, use, req_context, is_hit=key in reused_keys)
        use.has_finished = True
        self._let_go(use)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Drop n chunks, none of them protected; None, and nothing changed, where there are fewer."""
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
        """Everything is dropped, whatever it is used for."""
        self.policy.clear()
        self._generation += 1
        self._forget_all()

    def mark_evictable(self, key: bytes) -> None:
        """The last transfer of a chunk has ended."""
        self._evictable.add(key)
        use = self._use_of.get(key)
        if use is None:
            self._insert([key])
            return
        use.moving.discard(key)
        self._let_go(use)

    def mark_non_evictable(self, key: bytes) -> None:
        """A transfer of a chunk begins."""
        self._evictable.discard(key)
        use = self._use_of.get(key)
        if use is not None:
            use.moving.add(key)
        elif key in self._idle:
            self._hit(key)
            self._told.add(key)

    def check(self) -> None:
        """Raise `InvariantError` where the books disagree. O(chunks)."""
        self.policy.check()
        used = {key: use for use in self._uses.values() for key in use.keys}
        if used != self._use_of or any(not use.keys for use in self._uses.values()):
            raise InvariantError(f"{len(used)} chunks are used by requests, {len(self._use_of)} are counted")
        if sorted(self._key_of.items()) != sorted((chunk.chunk_id + 1, key) for key, chunk in self._chunks.items()):
            raise InvariantError(f"{len(self._key_of)} blocks are taken for {len(self._chunks)} chunks")
        ready = {key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0}
        if ready != self._evictable or self._idle != self._evictable - self._use_of.keys():
            raise InvariantError(f"{len(ready)} chunks can go, {len(self._evictable)} are counted")
        for use in self._uses.values():
            if use.moving != use.keys.keys() - ready or (use.has_finished and not use.moving):
                raise InvariantError(f"use {use.number} waits for {len(use.moving)} transfers, which is wrong")

    # The request's side.

    def _use(self, req_context: Any) -> Use:
        """Return the use of a request; a new one if it has none, or had one before the cache was cleared."""
        use = req_context.get_state(Use)
        if use is None or use.owner is not self or use.generation != self._generation or use.has_finished:
            self._num_uses += 1
            use = Use(self, self._generation, self._num_uses)
            req_context.set_state(use)
        return use  # type: ignore[no-any-return]

    def _access(self, key: bytes, use: Use, req_context: Any, *, is_hit: bool = True) -> None:
        """A request that did not have this chunk uses it. It stays with a younger one that has it."""
        if key in self._told:
            self._told.remove(key)
        elif is_hit:
            self._hit(key)
        if key in self._idle:
            self._take(key)
        owner = self._use_of.get(key)
        if owner is None or owner.has_finished or owner.number < use.number:
            self._leave(key)
            self._join(key, use, req_context.get_offload_key_position(key) or 0)

    def _hit(self, key: bytes) -> None:
        """Count one hit more; what was idle is with the policy no longer."""
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
        """A chunk is no longer in the use of a request, if it was."""
        use = self._use_of.pop(key, None)
        if use is None:
            return
        del use.keys[key]
        use.moving.discard(key)
        if not use.keys:
            del self._uses[use.number]
        self._let_go(use)

    def _drop(self, key: bytes) -> None:
        self._leave(key)
        del self._key_of[self._block(key)]
        del self._chunks[key]
        self._evictable.discard(key)
        self._told.discard(key)
        self._depth.pop(key, None)

    def _last_resort(self, n: int, protected: set[bytes]) -> list[bytes]:
        """n chunks that requests use: of the oldest request first, its last ones first."""
        found: list[bytes] = []
        for use in self._uses.values():
            for key in sorted(use.keys, key=use.keys.__getitem__)[::-1]:
                if len(found) == n:
                    return found
                if key not in use.moving and key not in protected:
                    found.append(key)
        return found

    # Back to the policy.

    def _let_go(self, use: Use) -> None:
        """The policy has a request's chunks again, if it has finished and none of them is being transferred."""
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
        """Make them idle, the last one first."""
        for key in reversed(keys):
            self.policy.insert(self._block(key), _number(key), self._depth.setdefault(key, 0))
            self._idle.add(key)

    def _order(self, use: Use, keys: list[bytes], req_context: Any) -> None:
        """From head to tail. Where vLLM knows the places of their last tokens, a chain may begin in mid-prompt."""
        places = [req_context.get_offload_key_position(key) for key in keys]
        ends = [end for end in places if end is not None]
        if len(ends) < len(keys) or not keys:
            ends = list(range(1, len(keys) + 1))
            chunk_tokens = 1
        else:
            order = sorted(range(len(keys)), key=ends.__getitem__)
            keys, ends = [keys[place] for place in order], [ends[place] for place in order]
            chunk_tokens = self._learned(ends)
        use.chain = keys
        before = (ends[0] - 1) // chunk_tokens if ends else 0
        for place, key in enumerate(keys):
            if key in self._chunks:
                self._depth[key] = before + place

    def _learned(self, ends: list[int]) -> int:
        """Tokens a chunk, as far as requests that begin at their first token with two chunks or more have shown it."""
        distinct = sorted(set(ends[:1] + [end for end in ends if end > ends[0]][:1]))
        if len(distinct) == 2 and distinct[1] == 2 * distinct[0]:
            self._chunk_tokens = min(self._chunk_tokens or distinct[0], distinct[0])
        return self._chunk_tokens or ends[0]

    def _block(self, key: bytes) -> int:
        return int(self._chunks[key].chunk_id) + 1


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big") % _KEY_PRIME
