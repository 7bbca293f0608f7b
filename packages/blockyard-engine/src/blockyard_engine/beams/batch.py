"""Runs several beam searches at once: in each step, all beams of all searches go through the model together."""

from __future__ import annotations

from collections import deque

import torch

from blockyard import KVCacheManager
from blockyard.config import CacheConfig
from blockyard.errors import NeverFits

from ..decoding.sampler import StepSampler
from ..moves import MoveQueue
from ..runner import ForwardBatch, StepRunner
from ..scheduling.limits import CacheLimits
from .search import BeamSearch


class BeamBatch:
    """Runs searches on a cache that serves nothing else meanwhile.

    A search starts when the blocks and sequences that it may need at most are available beside the running searches, so
    none is ever preempted. A prompt longer than `max_num_batched_tokens` is computed in its own step.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        runner: StepRunner,
        moves: MoveQueue,
        limits: CacheLimits,
        max_num_batched_tokens: int,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._moves = moves
        self._num_usable = limits.num_usable()
        self._budget = max_num_batched_tokens

    def require_fits(self, name: str, search: BeamSearch) -> None:
        """Raise `NeverFits` if an empty cache could not hold all beams at full length, sharing only the prompt."""
        config = self._cache.config
        num_tokens = len(search.prompt) + search.options.max_tokens
        if num_tokens > config.max_model_len:
            raise NeverFits(f"{name}: the beams may reach {num_tokens} tokens; max_model_len is {config.max_model_len}")
        needed = _most_blocks(config, search)
        if needed > self._num_usable:
            raise NeverFits(
                f"{name}: {search.options.num_beams} beams of {num_tokens} tokens may need {needed} blocks; "
                f"{self._num_usable} are usable"
            )

    def run(self, searches: list[BeamSearch]) -> None:
        """Run all searches to their ends. All blocks are freed, also if the model raises."""
        waiting = deque(searches)
        running: list[BeamSearch] = []
        try:
            while waiting or running:
                self._begin(waiting, running)
                logprobs = self._step(running)
                for search, part in zip(list(running), logprobs, strict=True):
                    if not search.advance(part, self._cache):
                        self._end(search)
                        running.remove(search)
        finally:
            for search in running:
                self._end(search)

    def _begin(self, waiting: deque[BeamSearch], running: list[BeamSearch]) -> None:
        """Start searches, in order, while budget, sequences and blocks allow."""
        config = self._cache.config
        num_tokens = sum(len(search.seqs) for search in running)
        num_seqs = sum(search.options.num_beams for search in running)
        num_blocks = sum(_most_blocks(config, search) for search in running)
        while waiting:
            search = waiting[0]
            num_tokens += len(search.prompt)
            num_seqs += search.options.num_beams
            num_blocks += _most_blocks(config, search)
            if num_seqs > config.max_num_seqs or num_blocks > self._num_usable:
                return
            if running and num_tokens > self._budget:
                return
            search.seqs = [
                self._cache.allocate(
                    search.prompt, holder="beam search", extra_keys=(), num_seqs=search.options.num_beams
                )
            ]
            running.append(waiting.popleft())

    def _step(self, running: list[BeamSearch]) -> list[torch.Tensor]:
        """Compute the new tokens of all beams; return log probabilities (beams, vocabulary) of each search.

        A prompt with checkpoints takes several steps.
        """
        seqs = [seq for search in running for seq in search.seqs]
        left = seqs
        found: dict[int, torch.Tensor] = {}
        while left:
            plan = self._cache.reserve(left)
            self._moves.note(plan)
            if not plan.all_fit:
                raise NeverFits(f"the beams need more blocks than the {self._cache.config.num_blocks} of the pool")
            batch = ForwardBatch.of(plan, self._cache.config.layer_groups, [1] * len(left))
            logits = self._runner.run(batch, self._moves)
            StepSampler(logits)  # raises if logits are not finite
            self._cache.commit(left, plan.num_scheduled)
            found.update(zip(left, logits, strict=True))
            left = [seq for seq in left if self._cache.num_computed_tokens(seq) < self._cache.num_tokens(seq)]
        logprobs = torch.stack([found[seq] for seq in seqs]).float().log_softmax(dim=-1)
        return list(logprobs.split([len(search.seqs) for search in running]))

    def _end(self, search: BeamSearch) -> None:
        self._cache.free(search.seqs)
        search.seqs = []


def _most_blocks(config: CacheConfig, search: BeamSearch) -> int:
    """Return how many blocks a search needs at most: all beams at full length, sharing only the prompt."""
    num_prompt, num_beams = len(search.prompt), search.options.num_beams
    needed = 0
    for group in config.layer_groups:
        shared = num_prompt // group.block_size
        needed += shared + num_beams * (-(-(num_prompt + search.options.max_tokens) // group.block_size) - shared)
    return needed
