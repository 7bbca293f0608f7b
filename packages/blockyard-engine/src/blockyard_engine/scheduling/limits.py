"""Limits of requests that an empty cache can serve, checked before a request is queued."""

from __future__ import annotations

from bisect import bisect_right

from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument, NeverFits
from blockyard.tenants import Roster, tenant_groups
from blockyard.windows import num_peak_blocks


class CacheLimits:
    """Computes which requests a cache can ever serve; `roster` has the tenants that share the pool."""

    def __init__(self, config: CacheConfig, max_num_batched_tokens: int) -> None:
        self._config = config
        self._budget = max_num_batched_tokens
        self.roster = Roster(tenant_groups(config.tenants))

    def require_fits(
        self, name: str, num_prompt_tokens: int, max_tokens: int, num_seqs: int = 1, tenant: int = 0
    ) -> None:
        """Raise `NeverFits`, with the numbers, for a request that an empty cache could not serve. O(groups).

        Raises `InvalidArgument` for more sequences than may run at once. `name` is the request's name in errors.
        """
        config = self._config
        if num_seqs > config.max_num_seqs:
            raise InvalidArgument(f"n of {name} is {num_seqs}; it must be at most max_num_seqs, {config.max_num_seqs}")
        asked = f"{name} has {num_prompt_tokens} tokens and may generate {max_tokens}"
        num_tokens = num_prompt_tokens + max_tokens
        if num_tokens > config.max_model_len:
            raise NeverFits(f"{asked}: {num_tokens} together; max_model_len is {config.max_model_len}")
        needed = self._num_needed(num_prompt_tokens, max_tokens, num_seqs)
        if needed > self.num_usable(tenant):
            whom = f"tenant {self.roster.names[tenant]!r}" if config.tenants else "one sequence"
            sizes = " and ".join(str(group.block_size) for group in config.layer_groups)
            # A window also holds the blocks of a chunk; here not even chunks of one token fit.
            has_window = any(group.sliding_window for group in config.layer_groups)
            chunks = f", computed token by token (max_num_batched_tokens is {self._budget})" if has_window else ""
            raise NeverFits(
                f"{asked}: {needed} blocks of {sizes}{chunks}; the cache can give {whom} "
                f"{self.num_usable(tenant)} (num_blocks is {config.num_blocks}, less the null block and a watermark of "
                f"{config.watermark_blocks}{', and the guarantees of others' if config.tenants else ''})"
            )

    def max_new_tokens(self, num_prompt_tokens: int, num_seqs: int = 1, tenant: int = 0) -> int:
        """Return the largest max_tokens that `require_fits` accepts; 0 for none. O(groups * log max_model_len)."""
        if num_seqs > self._config.max_num_seqs:
            return 0
        counts = range(1, self._config.max_model_len - num_prompt_tokens + 1)
        most = self.num_usable(tenant)
        return bisect_right(counts, most, key=lambda new: self._num_needed(num_prompt_tokens, new, num_seqs))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence of the tenant that may hold the most blocks. O(tenants)."""
        return 1 + self.max_new_tokens(1, tenant=max(range(len(self.roster.names)), key=self.num_usable))

    def num_usable(self, tenant: int = 0) -> int:
        """Return the blocks that admission gives out at most, to this tenant if tenants share the pool. O(1)."""
        return self.roster.max_blocks(tenant, self._config.num_blocks - 1, self._config.watermark_blocks)

    def num_blocks(self, num_tokens: int, chunk: int | None = None) -> int:
        """Return how many blocks, in all layer groups, one sequence holds at most while it grows to `num_tokens`.

        `chunk` is the number of tokens computed in a step; None for the maximum. A scheduler that halves the chunks of
        the only running sequence needs just the blocks for 1.
        """
        size = self._budget if chunk is None else chunk
        return sum(
            num_peak_blocks(num_tokens, size, group.sliding_window, group.block_size)
            for group in self._config.layer_groups
        )

    def _num_needed(self, num_prompt_tokens: int, max_tokens: int, num_seqs: int) -> int:
        # The last token's keys and values are never computed.
        num_computed = num_prompt_tokens + max_tokens - 1
        return max(self.num_blocks(num_computed, 1), self.num_admission_blocks(num_prompt_tokens, num_seqs))

    def num_admission_blocks(self, num_prompt_tokens: int, num_seqs: int) -> int:
        """Return the blocks of a prompt, plus one for each further sequence's first write into a shared block."""
        copies = sum(num_prompt_tokens % group.block_size != 0 for group in self._config.layer_groups)
        return self.num_blocks(num_prompt_tokens, 1) + (num_seqs - 1) * copies
