"""Why prompt tokens were not found in the cache: told to Prometheus, beside vLLM's own metrics.

A prompt is counted when it is admitted, as vLLM counts its hits; a request that was preempted does not count again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

CAUSES = ("hit", "evicted", "reset", "never_seen", "tail")
METRIC = "blockyard:prompt_tokens"


@cache
def counter() -> Any:
    """The process's counter, made once: `blockyard:prompt_tokens_total{cause=}`."""
    from prometheus_client import Counter  # vLLM needs it

    made = Counter(METRIC, "Prompt tokens of admitted requests, by why they were found in the cache or not.", ["cause"])
    for cause in CAUSES:
        made.labels(cause)
    return made


class MissCauses:
    """Which hashes were cached once; every token of a prompt gets one cause.

    hit: found. evicted, reset: cached once, and it or a block before it went. never_seen: a full block that was not
    cached yet, or went longer ago than `num_remembered` others. tail: behind the last full block, or the last token.
    """

    def __init__(self, num_remembered: int, tokens_of_hash: int) -> None:
        self.num_remembered = num_remembered
        self.tokens_of_hash = tokens_of_hash
        #: How many blocks have each hash now.
        self.cached: dict[bytes, int] = {}
        #: Why it is not there any more, oldest first.
        self.gone: dict[bytes, str] = {}
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
        """All went at once."""
        for block_hash in self.cached:
            self._remember(block_hash, "reset")
        self.cached.clear()

    def ask(self, request: Any, num_hits: int) -> None:
        """What a lookup means, to be counted if the request is admitted now. O(blocks that were not hit)."""
        self._asked = request.request_id, self.causes(request.block_hashes, request.num_tokens, num_hits)

    def admit(self, request: Any) -> None:
        """The request that was asked for last is admitted."""
        request_id, causes = self._asked
        if request_id == request.request_id and request.num_preemptions == 0:
            for cause, tokens in causes.items():
                self.totals[cause] += tokens
                counter().labels(cause).inc(tokens)

    def causes(self, block_hashes: Sequence[bytes], num_tokens: int, num_hits: int) -> dict[str, int]:
        """Tokens of a prompt by cause."""
        size = self.tokens_of_hash
        found = dict.fromkeys(CAUSES, 0) | {"hit": num_hits}
        # The last token is computed in any case, so a block that ends with it cannot be hit.
        full = max(num_hits // size, (num_tokens - 1) // size)
        cause = "evicted"
        for block_hash in block_hashes[num_hits // size : full]:
            # One that is cached, behind one that is gone, was lost with it.
            if block_hash not in self.cached:
                cause = self.gone.get(block_hash, "never_seen")
            found[cause] += size
        found["tail"] = num_tokens - sum(found.values())
        return found
