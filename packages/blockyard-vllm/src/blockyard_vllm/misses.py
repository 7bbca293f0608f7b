"""Counts prompt tokens by the cause of their miss, for Prometheus.

A prompt is counted at its admission, like vLLM's own hits; a preempted request is not counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

CAUSES = ("hit", "evicted", "reset", "other_keys", "never_seen", "tail")
METRIC = "blockyard:prompt_tokens"
#: First blocks to remember, each with the keys of the latest prompt that had it.
MAX_FIRST_BLOCKS = 65536
#: An adapter's name and path, and a salt.
Keys = tuple[tuple[str, str] | None, str | None]


@cache
def counter() -> Any:
    """Return the process's counter `blockyard:prompt_tokens_total{cause=}`, created once."""
    from prometheus_client import Counter  # vLLM needs it

    made = Counter(METRIC, "Prompt tokens of admitted requests, by why they were found in the cache or not.", ["cause"])
    for cause in CAUSES:
        made.labels(cause)
    return made


class StepMisses:
    """Assigns a cause to each token of a prompt.

    - hit: the token came from the cache.
    - evicted, reset: it was cached, but its block or an earlier one was evicted or reset.
    - other_keys: the prompt has no hit, and its first block was cached under another adapter or salt.
    - never_seen: its block was never cached, or evicted longer ago than `num_remembered` evictions.
    - tail: it comes after the last full block, or is the last token.

    Args:
        num_remembered: evicted hashes to remember.
        tokens_of_hash: tokens per hash.
    """

    def __init__(self, num_remembered: int, tokens_of_hash: int) -> None:
        self.num_remembered = num_remembered
        self.tokens_of_hash = tokens_of_hash
        #: Number of blocks with each hash.
        self.cached: dict[bytes, int] = {}
        #: Why a hash is no longer cached, oldest first.
        self.removed: dict[bytes, str] = {}
        #: By Python's hash of a first block's tokens, the keys of the latest prompt with it; oldest first. A collision
        #: can only make an explanation wrong.
        self.first_blocks: dict[int, Keys] = {}
        self.totals = dict.fromkeys(CAUSES, 0)
        self._asked: tuple[str, dict[str, int]] = ("", {})

    def note_cached(self, block_hash: bytes) -> None:
        """Record that one more block has this hash."""
        self.cached[block_hash] = self.cached.get(block_hash, 0) + 1
        self.removed.pop(block_hash, None)

    def note_removed(self, block_hash: bytes, cause: str = "evicted") -> None:
        """Record that a block lost this hash."""
        left = self.cached.get(block_hash, 1) - 1
        if left > 0:
            self.cached[block_hash] = left
            return
        self.cached.pop(block_hash, None)
        self._remember(block_hash, cause)

    def _remember(self, block_hash: bytes, cause: str) -> None:
        self.removed.pop(block_hash, None)
        self.removed[block_hash] = cause
        if len(self.removed) > self.num_remembered:
            del self.removed[next(iter(self.removed))]

    def note_reset(self) -> None:
        """Record that all blocks lost their hashes."""
        for block_hash in self.cached:
            self._remember(block_hash, "reset")
        self.cached.clear()

    def record_lookup(self, request: Any, num_hits: int) -> None:
        """Record a lookup; it counts if this request is admitted next. O(blocks that did not hit)."""
        keys = keys_of(request)
        is_other = num_hits == 0 and self.first_blocks.get(self._first_block(request), keys) != keys
        self._asked = request.request_id, self.causes(request.block_hashes, request.num_tokens, num_hits, is_other)

    def count_admission(self, request: Any) -> None:
        """Count the latest lookup, since its request is admitted."""
        request_id, causes = self._asked
        if request_id == request.request_id and request.num_preemptions == 0:
            for cause, tokens in causes.items():
                self.totals[cause] += tokens
                counter().labels(cause).inc(tokens)
        if request.num_tokens >= self.tokens_of_hash:
            name = self._first_block(request)
            self.first_blocks.pop(name, None)
            self.first_blocks[name] = keys_of(request)
            if len(self.first_blocks) > MAX_FIRST_BLOCKS:
                del self.first_blocks[next(iter(self.first_blocks))]

    def _first_block(self, request: Any) -> int:
        return hash(tuple(request.all_token_ids[: self.tokens_of_hash]))

    def causes(
        self, block_hashes: Sequence[bytes], num_tokens: int, num_hits: int, is_other: bool = False
    ) -> dict[str, int]:
        """Return a prompt's tokens by cause.

        Args:
            block_hashes: hashes of its full blocks.
            num_tokens: its length.
            num_hits: tokens that hit.
            is_other: whether unseen blocks may have been cached under other keys.
        """
        size = self.tokens_of_hash
        found = dict.fromkeys(CAUSES, 0) | {"hit": num_hits}
        # The last token is always computed, so a block that ends with it cannot hit.
        full = max(num_hits // size, (num_tokens - 1) // size)
        cause, unknown = "evicted", "other_keys" if is_other else "never_seen"
        for block_hash in block_hashes[num_hits // size : full]:
            # A cached block after a removed one was lost with it.
            if block_hash not in self.cached:
                cause = self.removed.get(block_hash, unknown)
            found[cause] += size
        found["tail"] = num_tokens - sum(found.values())
        return found


def keys_of(request: Any) -> Keys:
    """Return the keys of a prompt's first block besides its tokens: adapter and salt."""
    adapter = request.lora_request
    return (adapter.name, adapter.path or "") if adapter else None, request.cache_salt or None
