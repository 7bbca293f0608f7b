"""Why prompt tokens were not found in the cache: told to Prometheus, beside vLLM's own metrics.

A prompt is counted when it is admitted, as vLLM counts its hits; a request that was preempted does not count again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

CAUSES = ("hit", "evicted", "reset", "other_keys", "never_seen", "tail")
METRIC = "blockyard:prompt_tokens"
#: As many first blocks are remembered, with the keys of the prompt that had each last.
MAX_FIRST_BLOCKS = 65536
#: An adapter's name and path, and a salt.
Keys = tuple[tuple[str, str] | None, str | None]


@cache
def counter() -> Any:
    """Return the process's counter, made once: `blockyard:prompt_tokens_total{cause=}`."""
    from prometheus_client import Counter  # vLLM needs it

    made = Counter(METRIC, "Prompt tokens of admitted requests, by why they were found in the cache or not.", ["cause"])
    for cause in CAUSES:
        made.labels(cause)
    return made


class StepMisses:
    """Which hashes were cached once; every token of a prompt gets one cause.

    hit: found. evicted, reset: cached once, and it or a block before it went. other_keys: of a prompt of which nothing
    was found, and whose first block an earlier prompt had under another adapter or salt. never_seen: a full block that
    was not cached yet, or went longer ago than `num_remembered` others. tail: behind the last full block, or the last
    token.
    """

    def __init__(self, num_remembered: int, tokens_of_hash: int) -> None:
        self.num_remembered = num_remembered
        self.tokens_of_hash = tokens_of_hash
        #: How many blocks have each hash now.
        self.cached: dict[bytes, int] = {}
        #: Why it is not there any more, oldest first.
        self.gone: dict[bytes, str] = {}
        #: The keys under which the tokens of each first block, by their hash, were admitted last; oldest first. A hash
        #: that two have can make an explanation wrong, nothing else.
        self.first_blocks: dict[int, Keys] = {}
        self.totals = dict.fromkeys(CAUSES, 0)
        self._asked: tuple[str, dict[str, int]] = ("", {})

    def came(self, block_hash: bytes) -> None:
        """A block has this hash from now on."""
        self.cached[block_hash] = self.cached.get(block_hash, 0) + 1
        self.gone.pop(block_hash, None)

    def went(self, block_hash: bytes, cause: str = "evicted") -> None:
        """A block has it no longer."""
        left = self.cached.get(block_hash, 1) - 1
        if left > 0:
            self.cached[block_hash] = left
            return
        self.cached.pop(block_hash, None)
        self._remember(block_hash, cause)

    def _remember(self, block_hash: bytes, cause: str) -> None:
        self.gone.pop(block_hash, None)
        self.gone[block_hash] = cause
        if len(self.gone) > self.num_remembered:
            del self.gone[next(iter(self.gone))]

    def were_reset(self) -> None:
        """Note that all went at once."""
        for block_hash in self.cached:
            self._remember(block_hash, "reset")
        self.cached.clear()

    def ask(self, request: Any, num_hits: int) -> None:
        """Note what a lookup means, to be counted if the request is admitted now. O(blocks that were not hit)."""
        is_other = num_hits == 0 and self._has_other_keys(request)
        self._asked = request.request_id, self.causes(request.block_hashes, request.num_tokens, num_hits, is_other)

    def admit(self, request: Any) -> None:
        """Count the request that was asked for last: it is admitted."""
        request_id, causes = self._asked
        if request_id == request.request_id and request.num_preemptions == 0:
            for cause, tokens in causes.items():
                self.totals[cause] += tokens
                counter().labels(cause).inc(tokens)
        self._note_keys(request)

    def _has_other_keys(self, request: Any) -> bool:
        """Return whether an earlier prompt began with the same block under other keys. O(tokens of a block)."""
        keys = keys_of(request)
        return self.first_blocks.get(self._first_block(request), keys) != keys

    def _note_keys(self, request: Any) -> None:
        """The request's first block is cached under its keys, or will be. O(tokens of a block)."""
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
        """Return tokens of a prompt by cause. is_other: what was never seen may have been cached under other keys."""
        size = self.tokens_of_hash
        found = dict.fromkeys(CAUSES, 0) | {"hit": num_hits}
        # The last token is computed in any case, so a block that ends with it cannot be hit.
        full = max(num_hits // size, (num_tokens - 1) // size)
        cause, unknown = "evicted", "other_keys" if is_other else "never_seen"
        for block_hash in block_hashes[num_hits // size : full]:
            # One that is cached, behind one that is gone, was lost with it.
            if block_hash not in self.cached:
                cause = self.gone.get(block_hash, unknown)
            found[cause] += size
        found["tail"] = num_tokens - sum(found.values())
        return found


def keys_of(request: Any) -> Keys:
    """What keeps a prompt apart from all others from its first block on, besides its tokens: its adapter and salt."""
    adapter = request.lora_request
    return (adapter.name, adapter.path or "") if adapter else None, request.cache_salt or None
