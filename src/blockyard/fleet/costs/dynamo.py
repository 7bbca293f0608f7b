"""Dynamo's cost is a sum of blocks to compute and blocks held, or a product (NVIDIA Dynamo's kv_router, 2026)."""

from __future__ import annotations

from ..asking import Ask, Candidates, Floats, PlainCost

#: What a hit counts that is not on the GPU but in the host's memory.
HOST_CREDIT = 0.75


def overlap(candidates: Candidates) -> Floats:
    """Return the leading tokens that each has, those outside the GPU at Dynamo's credit."""
    return candidates.gpu_hits + HOST_CREDIT * (candidates.hits - candidates.gpu_hits)


class Dynamo(PlainCost):
    """Takes the least of `scale * (blocks to compute, with those queued) + blocks held`; temperature 0, its default."""

    def __init__(self, prefill_load_scale: float = 1.0) -> None:
        self._scale = prefill_load_scale

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return tokens, which order replicas as blocks do."""
        prefill = (candidates.uncached + ask.num_tokens - overlap(candidates)).clip(0)
        return self._scale * prefill + candidates.held + ask.num_tokens


class LMetric(PlainCost):
    """Takes the least product of tokens to compute, with those queued, and requests there with this one."""

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return tokens times requests."""
        prefill = (candidates.uncached + ask.num_tokens - overlap(candidates)).clip(0)
        return prefill * (candidates.requests + 1)
