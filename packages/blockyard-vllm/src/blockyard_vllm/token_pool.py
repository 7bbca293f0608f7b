"""Level "tokens": the block pool that vLLM's scheduler, connectors and tests see, on `blockyard.BlockPool`.

Blocks are held by leases and cached by their tokens. vLLM's hashes are only recorded, to name blocks in events. A
request's adapter, salt, images and embeddings become extra keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_block_hash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from blockyard import BlockLease, BlockPool, CacheSalt, FoundBlocks, LoRA, Span
from blockyard.keys import ExtraKey

from .misses import StepMisses
from .objects import Block, EnginePool

#: Replaces vLLM's negative placeholder tokens outside of images, which vLLM treats like any other token.
PLACEHOLDER = 2**31 - 1


def tokens_of(request: Any, start: int, stop: int) -> list[int]:
    """Return the request's tokens from `start` to `stop`, in the form that the pool accepts."""
    tokens: list[int] = request.all_token_ids[start:stop]
    if request.mm_features and min(tokens, default=0) < 0:
        return [token if token >= 0 else PLACEHOLDER for token in tokens]
    return tokens


class RequestKeys(NamedTuple):
    """A request's extra keys, and their sources.

    vLLM changes requests after they were added: the next input of a streaming session may bring more images.
    """

    keys: tuple[ExtraKey, ...]
    lora_request: Any
    cache_salt: str | None
    prompt_embeds: Any
    num_features: int

    def match(self, request: Any) -> bool:
        """Return whether the keys are still valid for the request."""
        return (
            self.num_features == len(request.mm_features or ())
            and self.lora_request is request.lora_request
            and self.cache_salt == request.cache_salt
            and self.prompt_embeds is request.prompt_embeds
        )


def request_keys(request: Any, block_size: int) -> RequestKeys:
    """Return the request's adapter, cache salt, images and embeddings. O(images + blocks of embeddings)."""
    keys: list[ExtraKey] = []
    features = request.mm_features or ()
    if request.lora_request:
        keys.append(LoRA(_valid_unicode(request.lora_request.name), _valid_unicode(request.lora_request.path or "")))
    if request.cache_salt:
        keys.append(CacheSalt(_valid_unicode(request.cache_salt)))
    for feature in features:
        position = feature.mm_position
        content = _valid_unicode(feature.identifier) or "\0"
        keys.append(Span(content, position.offset, max(1, position.length), "mm"))
    if request.prompt_embeds is not None:
        keys += _embeddings(request, block_size)
    once = tuple(dict.fromkeys(keys))
    return RequestKeys(once, request.lora_request, request.cache_salt, request.prompt_embeds, len(features))


def _valid_unicode(text: str) -> str:
    """Return the text, or its code units in hexadecimal if it is not valid Unicode, which the pool refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "\0" + text.encode("utf-16-be", "surrogatepass").hex()
    return text


def _embeddings(request: Any, block_size: int) -> list[Span]:
    """Return a span for each block with embeddings, named by vLLM's digest of them."""
    spans, count = [], len(request.prompt_embeds)
    for start in range(0, count, block_size):
        extra, _ = generate_block_hash_extra_keys(request, start, start + block_size, 0)
        digest = next(key[1] for key in extra or () if key[0] == "prompt_embeds")
        spans.append(Span(digest.hex(), start, min(block_size, count - start), "prompt_embeds"))
    return spans


class TokenPool(EnginePool):
    """vLLM's block pool on level "tokens". Block objects are created on demand."""

    def __init__(
        self,
        pool: BlockPool,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        metrics_collector: Any,
        misses: StepMisses | None,
    ) -> None:
        super().__init__(pool, enable_kv_cache_events, metrics_collector)
        self.misses = misses
        self.num_gpu_blocks = pool.num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = pool.block_size
        self.medium = MEDIUM_GPU

    def block(self, block_id: int) -> Block:
        return Block(self, block_id)

    @property
    def blocks(self) -> list[Block]:
        return [Block(self, block_id) for block_id in range(self.num_gpu_blocks)]

    def find(self, key: Any) -> int:
        return next((block_id for block_id, name in self.names.items() if name[0] == key), 0)

    def cached_keys(self) -> Iterator[tuple[Any, int]]:
        return ((name[0], block_id) for block_id, name in self.names.items())

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Block] | None:
        """Find a block by vLLM's hash. O(cached blocks)."""
        found = self.find(make_block_hash_with_group_id(block_hash, 0))
        return [Block(self, found)] if found else None

    def touch(self, blocks: Sequence[Any]) -> None:
        """Raise: connectors that pin blocks by id need level "names"."""
        raise NotImplementedError("blockyard: level 'tokens' cannot hold blocks by id; set level to 'names'")

    # Leases.

    def blocks_of_lease(self, lease: BlockLease) -> list[Block]:
        """Return a lease's blocks, for `free_blocks`."""
        return [Block(self, block_id, lease, place) for place, block_id in enumerate(lease)]

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Return blocks under a new lease."""
        lease = self.pool.get_new_blocks(num_blocks)
        self.note_taken(list(lease))
        return self.blocks_of_lease(lease)

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Free blocks returned by `blocks_of_lease`: whole leases or parts of them."""
        given: dict[int, list[Block]] = {}
        for block in ordered_blocks:
            if block.lease is None:
                raise ValueError(f"block {block.block_id} belongs to no lease; on level 'tokens' it cannot be freed")
            given.setdefault(block.lease.serial, []).append(block)
        for blocks in given.values():
            lease: Any = blocks[0].lease
            if len(blocks) < sum(1 for block_id in lease if block_id):
                for block in blocks:
                    self.pool.release(lease, block.position, block.position + 1)
            else:
                self.pool.free_blocks(lease)

    # Caching.

    def limit_to_hashes(self, found: FoundBlocks, hashes: Sequence[Any]) -> FoundBlocks:
        """Return the leading found blocks whose hashes are also the request's.

        A hash covers everything before it, so the last one that agrees covers all. A hash may differ because it covers
        something that the pool does not compare: tokens after the block, or a kind of key that the adapter does not
        know.
        """
        count = len(found)
        while count and not self._is_named(found.block_ids[count - 1], hashes, count - 1):
            count -= 1
        return found if count == len(found) else found.first(count)

    def _is_named(self, block_id: Any, hashes: Sequence[Any], position: int) -> bool:
        name = self.names.get(int(block_id))
        if name is None or position >= len(hashes):
            return False
        return bool(name[0] == make_block_hash_with_group_id(hashes[position], 0))

    def cache(self, request: Any, lease: BlockLease, full: int, keys: tuple[ExtraKey, ...]) -> None:
        """Cache a request's first `full` blocks, as far as they have hashes. O(new tokens)."""
        first, size, hashes = lease.num_cached_blocks, self.pool.block_size, request.block_hashes
        full = min(full, len(hashes))
        if first >= full:
            return
        self.pool.cache_next_blocks(lease, tokens_of(request, first * size, full * size), first, extra_keys=keys)
        for position in range(first, full):
            name = make_block_hash_with_group_id(hashes[position], 0)
            self.names[lease[position]] = (name, (position + 1) * size)
        if self.misses is not None:
            for block_hash in hashes[first:full]:
                self.misses.note_cached(block_hash)
        if self.enable_kv_cache_events:
            self.publish_stored(request, first, full)

    def note_taken(self, new: list[int]) -> None:
        """Record blocks taken from the free queue; their contents are evicted."""
        names = self.names
        for block_id in new:
            if block_id in names:
                self._forget(block_id)
        if self.metrics_collector:
            for block_id in new:
                self.metrics_collector.on_block_evicted(Block(self, block_id))
                self.metrics_collector.on_block_allocated(Block(self, block_id))

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Uncache these blocks, as after a failed load."""
        for block_id in block_ids:
            assert block_id < self.num_gpu_blocks, f"Invalid block_id {block_id} >= {self.num_gpu_blocks}"
        cached = [block_id for block_id in block_ids if block_id in self.names]
        self.pool.uncache(cached)
        for block_id in cached:
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        block_hash = get_block_hash(self.names.pop(block_id)[0])
        if self.misses is not None:
            self.misses.note_removed(block_hash)
        if self.enable_kv_cache_events:
            removed = [maybe_convert_block_hash(block_hash)]
            self.kv_event_queue.append(BlockRemoved(block_hashes=removed, medium=MEDIUM_GPU, group_idx=0))

    def publish_stored(self, request: Any, first: int, full: int) -> None:
        """Queue the event for a request's blocks from `first` to `full`."""
        size = self.hash_block_size
        extra, index = [], 0
        for position in range(first, full):
            keys, index = generate_block_hash_extra_keys(request, position * size, (position + 1) * size, index)
            extra.append(keys)
        lora = request.lora_request
        stored = BlockStored(
            block_hashes=[maybe_convert_block_hash(name) for name in request.block_hashes[first:full]],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
            token_ids=request.all_token_ids[first * size : full * size],
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_GPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=0,
            session_id=request.session_id,
        )
        self.kv_event_queue.append(stored)
