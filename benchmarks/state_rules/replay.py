"""This runs requests with states through the real manager, to compare what it hits with what `StateRun` says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager, StateHints
from blockyard.arguments import require_int
from blockyard.config import cache_config
from blockyard.errors import NeverFits, OutOfBlocks
from blockyard.extending import MOST_SESSIONS
from blockyard.groups import LayerGroup, StateSpec

#: Tokens are below it: a key is cut into parts of this many bits.
TOKEN_BITS = 31


class StateReplay:
    """It has the calls of `StateRun`, and a `KVCacheManager` that runs one request after another.

    order, places, state_tokens, budget, block_size: as there. room: blocks that running requests have besides the
    budget, as memory of running requests is in no budget there; between requests they are taken away, so that no more
    than the budget is kept. 0: requests run in the budget, as they do on a device, and one that does not fit runs
    without the cache and hits nothing.

    >>> run = StateReplay("lru", ("branch", "ends"), state_tokens=16, budget=1600)
    >>> keys = np.arange(1, 11)
    >>> [run.request(keys, 155, 160, requested=[], waiting=[]) for _ in range(2)]
    [0, 144]
    """

    def __init__(
        self,
        order: str,
        places: tuple[str, ...],
        state_tokens: int,
        budget: int,
        block_size: int = 16,
        room: int = 0,
        **fields: object,
    ) -> None:
        groups = (
            LayerGroup(block_size, token_bytes=1),
            StateSpec(state_bytes=state_tokens, checkpoint_every=block_size),
        )
        self.block_size = block_size
        self.room = room
        num_blocks = 1 + budget // block_size + room
        config = {"max_num_seqs": 1, "watermark": 0.0, "max_model_len": block_size * num_blocks, **fields}
        self.cache = KVCacheManager(
            cache_config(num_blocks, groups=groups, state_checkpoints=places, state_order=order, **config)  # type: ignore[arg-type]
        )
        #: Requests that did not fit.
        self.num_refused = 0
        self._num_fresh = 0

    @property
    def num_written(self) -> int:
        """States that were written and not replaced by the next one of the same output."""
        return self.cache.stats().num_kept_states - self.cache.stats().num_replaced_states

    def _tokens(self, keys: npt.NDArray[np.int64], num_tokens: int) -> npt.NDArray[np.int64]:
        """Each block begins with its key; what lies behind the last one is found nowhere else."""
        tokens = np.zeros((num_tokens // self.block_size + 1, self.block_size), dtype=np.int64)
        tokens[: len(keys), 0] = (keys & (2**TOKEN_BITS - 1))[: len(tokens)]
        tokens[: len(keys), 1] = (keys >> TOKEN_BITS)[: len(tokens)]
        if len(tokens) > len(keys):
            self._num_fresh += 1
            tokens[len(keys) :, :2] = self._num_fresh & (2**TOKEN_BITS - 1), 2**TOKEN_BITS - 1
        flat: npt.NDArray[np.int64] = tokens.ravel()[:num_tokens]
        return flat

    def request(
        self,
        keys: npt.NDArray[np.int64],
        num_prompt: int,
        num_total: int,
        requested: list[int],
        waiting: list[int],
        session: int = 0,
    ) -> int:
        """Return the tokens that a request hits; see `StateRun.request`. It runs from begin to end."""
        number = require_int("session", session, 0, MOST_SESSIONS)
        tokens = self._tokens(keys, max(num_prompt, num_total))
        prompt = tokens[:num_prompt]
        waiting_prompts = [np.append(prompt[:position], (2**TOKEN_BITS - 1, 0)) for position in waiting[:64]]
        checkpoints = sorted({place for place in requested if 0 < place <= num_prompt})
        try:
            seq = self.cache.allocate(
                prompt, session=f"{number}" if number else None, states=StateHints(checkpoints, waiting_prompts)
            )
        except (NeverFits, OutOfBlocks):
            self.num_refused += 1
            return 0
        hit = int(self.cache.num_computed_tokens(seq))
        self._compute(seq, hit, tokens, num_prompt, num_total // self.block_size * self.block_size)
        self.cache.free(seq)
        if self.room > 0:
            self.cache.pool.free_blocks(self.cache.pool.get_new_blocks(self.room, holder="ballast"))
        return hit

    def over(self, session: int) -> None:
        """See `StateRun.over`."""
        self.cache.hint(f"{require_int('session', session, 1, MOST_SESSIONS)}", over=True)

    def _compute(self, seq: int, start: int, tokens: npt.NDArray[np.int64], num_prompt: int, num_total: int) -> None:
        """Run the prefill, then the output from one checkpoint position to the next."""
        while start < num_prompt:
            plan = self.cache.reserve([seq])
            start += int(plan.num_scheduled[0])
            new = [int(tokens[start])] if start == num_prompt < len(tokens) else None
            self.cache.commit([seq], int(plan.num_scheduled[0]), new)
        while start < num_total:
            plan = self.cache.reserve([seq], min(self.block_size - start % self.block_size, num_total - start))
            if not plan.all_fit:
                return
            count = int(plan.num_scheduled[0])
            new_tokens = tokens[start + 1 : start + 1 + count]
            self.cache.commit([seq], count, new_tokens.reshape(1, -1) if len(new_tokens) else None)
            start += count
