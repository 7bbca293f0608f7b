"""mini-sglang's own managers of prompts and decoding on a pool: `make interop MINI_SGLANG=checkout`.

Its own cache manager needs a GPU's kernels, so it is not run beside ours.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from blockyard_testing.seeds import run_seed
from engines.mini_sglang import CacheManager

from ..support.checkouts import checkout, import_from
from ..support.mini_engine import drive


@pytest.fixture(scope="module")
def sources() -> list[Any]:
    package = checkout("MINI_SGLANG", "python/minisgl")
    names = ("core", "scheduler.prefill", "scheduler.decode", "scheduler.table")
    try:
        return import_from(package, *names)
    except ImportError as error:
        pytest.skip(f"mini-sglang needs what is not installed: {error}")


class TheirManagers:
    """Its managers as its scheduler calls them."""

    def __init__(self, sources: list[Any], cache: CacheManager) -> None:
        self._core, prefill, decode, table = sources
        self.table = table.TableManager(6, cache.page_table)
        self.decode = decode.DecodeManager(cache.page_size)
        self.prefill = prefill.PrefillManager(cache, self.table, self.decode)

    @property
    def runnable(self) -> bool:
        return self.prefill.runnable or self.decode.runnable

    def add(self, uid: int, input_ids: Any, max_tokens: int) -> None:
        wanted = self._core.SamplingParams(max_tokens=max_tokens)
        self.prefill.add_one_req(SimpleNamespace(uid=uid, input_ids=input_ids, sampling_params=wanted))

    def next_batch(self, budget: int) -> tuple[list[Any], bool]:
        batch = self.prefill.schedule_next_batch(budget) or self.decode.schedule_next_batch()
        return batch.reqs, batch.is_prefill

    def filter(self, batch: list[Any]) -> None:
        self.decode.filter_reqs(batch)

    def end(self, req: Any) -> None:
        self.decode.remove_req(req)
        self.table.free(req.table_idx)


def answers(sources: list[Any], num_pages: int, page_size: int, seed: int) -> dict[int, list[int]]:
    draw = random.Random(seed)
    cache = CacheManager(num_pages, page_size, torch.zeros((6, 64), dtype=torch.int32))
    managers = TheirManagers(sources, cache)
    heads = [[draw.randrange(50) for _ in range(draw.randint(1, 20))] for _ in range(3)]
    for uid in range(12):
        prompt = draw.choice(heads) + [draw.randrange(50) for _ in range(draw.randint(1, 9))]
        managers.add(uid, torch.tensor(prompt, dtype=torch.int32), draw.randint(1, 8))
    done = drive(managers, cache, draw.choice((5, 16, 64)))
    cache.check_integrity()
    assert cache.pool.num_used_blocks == 0
    assert managers.table.available_size == 6
    return done


def test_its_managers_read_what_was_written(sources: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no GPU that would read the memory while it is copied.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    base = run_seed()
    for seed in range(base, base + 100):
        page_size = (1, 2, 4)[seed % 3]
        few, many = (answers(sources, number, page_size, seed) for number in (80 // page_size, 2000))
        assert few == many
