"""Steps of made-up sequences, keys and values, to test attention backends without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from blockyard.storage import KVCache
from blockyard_engine.attention.interface import GroupTables, StepShape

NUM_LAYERS = 4
WINDOW = 13
#: Layers of the group that reads all, and of the group with a window.
GROUPS = ((0, 2), (1, 3))


@dataclass(frozen=True, slots=True)
class Step:
    """A step's lengths and tables, and the tensors of every layer: cached ones and new ones."""

    shape: StepShape
    block_size: int
    num_blocks: int
    num_kv_heads: int
    cached: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def rounded_to(self, dtype: torch.dtype) -> Step:
        """Return the same step with every number rounded to `dtype`, still in float32."""
        tensors = {name: getattr(self, name).to(dtype).float() for name in ("cached", "query", "key", "value")}
        return replace(self, **tensors)


def random_step(
    rng: np.random.Generator, num_heads: int, num_kv_heads: int, block_size: int, head_size: int = 16
) -> Step:
    """Return sequences of every kind, in any order: decodes, whole prompts, chunks and drafts after cached tokens.

    Blocks before a window are the null block, as in the manager; unowned blocks hold NaN.
    """
    kinds = [(0, 1), (0, 17), (5, 1), (block_size, 1), (30, 1), (block_size * 2 - 1, 1), (19, 6), (2 * block_size, 9)]
    chosen = [kinds[kind] for kind in rng.permutation(len(kinds))]
    num_computed = np.array([computed for computed, _ in chosen], np.int64)
    num_scheduled = np.array([new for _, new in chosen], np.int64)
    widths = -(-(num_computed + num_scheduled) // block_size)
    num_blocks = 2 * int(widths.sum()) + 4
    ids = iter((rng.permutation(num_blocks - 1) + 1).tolist())
    groups = []
    owned = np.zeros(num_blocks, bool)
    for window in (0, WINDOW):
        tables = np.zeros((len(chosen), int(widths.max()) + 1), np.int32)
        slots: list[int] = []
        for row, (computed, new) in enumerate(chosen):
            first = max(0, computed - window + 1) // block_size if window else 0
            for column in range(first, int(widths[row])):
                tables[row, column] = next(ids)
            slots += [
                int(tables[row, at // block_size]) * block_size + at % block_size
                for at in range(computed, computed + new)
            ]
        owned[tables.reshape(-1)] = True
        groups.append(GroupTables(np.array(slots, np.int64), tables, window))
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    num_tokens = int(num_scheduled.sum())
    cached = torch.randn((2, num_blocks, 2, block_size, num_kv_heads, head_size), generator=generator)
    cached[:, ~torch.from_numpy(owned)] = float("nan")
    cached[:, 0] = 0
    query = torch.randn((NUM_LAYERS, num_heads, num_tokens, head_size), generator=generator)
    key, value = torch.randn((2, NUM_LAYERS, num_tokens, num_kv_heads, head_size), generator=generator)
    shape = StepShape(num_computed, num_scheduled, groups)
    return Step(shape, block_size, num_blocks, num_kv_heads, cached, query, key, value)


def run_step(
    step: Step, backend: Any, *, layout: str = "NHD", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a backend's output, (layers, T, heads, head_size) in float32 on the CPU."""
    head_size = step.query.shape[3]
    sizes = (step.num_blocks, step.block_size, NUM_LAYERS, step.num_kv_heads, head_size)
    cache = KVCache(*sizes, dtype=dtype, device=device, layout=layout, layer_groups=GROUPS)
    cached = step.cached if layout == "NHD" else step.cached.transpose(3, 4)
    cache.data.copy_(cached.to(dtype))
    attend = backend(cache, 4096).begin(step.shape)
    outputs = []
    for layer in range(NUM_LAYERS):
        query, key, value = (tensors[layer].to(device, dtype) for tensors in (step.query, step.key, step.value))
        outputs.append(attend(layer, query, key, value, 0.3, {}).float().cpu())
    return torch.stack(outputs)
