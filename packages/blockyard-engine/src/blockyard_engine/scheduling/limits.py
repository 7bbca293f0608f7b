"""What an empty cache can carry to its end, asked before a request is taken in."""

from __future__ import annotations

from bisect import bisect_right

from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument, NeverFits
from blockyard.tenants import Roster, tenant_groups
from blockyard.windows import num_peak_blocks


class CacheLimits:
    """It knows sizes of requests that can and that cannot ever be served. roster: the tenants who share the pool."""

    def __init__(self, config: CacheConfig, max_num_batched_tokens: int) -> None:
        self._config = config
        self._budget = max_num_batched_tokens
        self.roster = Roster(tenant_groups(config.tenants))

    def require_fits(
        self, name: str, num_prompt_tokens: int, max_tokens: int, num_seqs: int = 1, tenant: int = 0
    ) -> None:
        """Raise `NeverFits`, with the numbers, for a request that an empty cache could not carry to its end. O(groups).

        Raises `InvalidArgument` for more sequences than run at once.
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
            raise NeverFits(
                f"{asked}: {needed} blocks of {_sizes(config)}{self._chunks()}; the cache can give {whom} "
                f"{self.num_usable(tenant)} (num_blocks is {config.num_blocks}, less the null block and a watermark of "
                f"{config.watermark_blocks}{', and the floors of others' if config.tenants else ''})"
            )

    def _chunks(self) -> str:
        """Windows hold a chunk's blocks too, and even the smallest chunk does not fit."""
        has_window = any(group.sliding_window for group in self._config.layer_groups)
        return f", computed token by token (max_num_batched_tokens is {self._budget})" if has_window else ""

    def max_new_tokens(self, num_prompt_tokens: int, num_seqs: int = 1, tenant: int = 0) -> int:
        """Return the largest max_tokens that `require_fits` lets pass; 0 for none. O(groups * log max_model_len)."""
        if num_seqs > self._config.max_num_seqs:
            return 0
        counts = range(1, self._config.max_model_len - num_prompt_tokens + 1)
        most = self.num_usable(tenant)
        return bisect_right(counts, most, key=lambda new: self._num_needed(num_prompt_tokens, new, num_seqs))

    @property
    def max_model_len(self) -> int:
        """Return the tokens of the longest sequence, of the tenant who may hold most. O(tenants)."""
        return 1 + self.max_new_tokens(1, tenant=max(range(len(self.roster.names)), key=self.num_usable))

    def num_usable(self, tenant: int = 0) -> int:
        """Return the blocks that admission gives out at most, to a tenant where some share the pool. O(1)."""
        return self.roster.most(tenant, self._config.num_blocks - 1, self._config.watermark_blocks)

    def num_blocks(self, num_tokens: int, chunk: int | None = None) -> int:
        """Count the blocks, of all layer groups, that one sequence holds at its fullest while it grows to `num_tokens`.

        chunk: tokens computed in one step; as many as a step may have if None. A scheduler that halves the chunks of a
        sequence that runs alone needs only those of 1.
        """
        size = self._budget if chunk is None else chunk
        return sum(
            num_peak_blocks(num_tokens, size, group.sliding_window, group.block_size)
            for group in self._config.layer_groups
        )

    def _num_needed(self, num_prompt_tokens: int, max_tokens: int, num_seqs: int) -> int:
        # The last token's keys and values are never computed.
        num_computed = num_prompt_tokens + max_tokens - 1
        return max(self.num_blocks(num_computed, 1), self.num_at_admission(num_prompt_tokens, num_seqs))

    def num_at_admission(self, num_prompt_tokens: int, num_seqs: int) -> int:
        """The prompt's blocks, and one for each further sequence's first write into a shared block."""
        copies = sum(num_prompt_tokens % group.block_size != 0 for group in self._config.layer_groups)
        return self.num_blocks(num_prompt_tokens, 1) + (num_seqs - 1) * copies


def _sizes(config: CacheConfig) -> str:
    return " and ".join(str(group.block_size) for group in config.layer_groups)
