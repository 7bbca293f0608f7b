"""Charges each block of a pool to the tenant that takes it."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..budget import SharedBudget
from .ledger import BlockLedger
from .observer import PoolObserver


class BudgetWatch(PoolObserver):
    """Keeps the counts of a shared budget. A block is charged once, whatever the number of its holders."""

    def __init__(self, ledger: BlockLedger, budget: SharedBudget) -> None:
        self.ledger = ledger
        self.budget = budget

    def on_acquire(self, blocks: vec[i32], start: i64, count: i64) -> None:
        budget = self.budget
        for position in range(start, start + count):
            budget.of_block[i64(blocks[position])] = budget.acting
            budget.is_held[i64(blocks[position])] = 1
        budget.hold(budget.acting, count)
        budget.take_chosen(budget.acting, count)

    def on_share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        budget = self.budget
        for position in range(start, start + count):
            block = i64(blocks[position])
            if budget.is_held[block] == 0:
                budget.is_held[block] = 1
                budget.hold(budget.of_block[block], 1)

    def on_evict(self, block: i64) -> None:
        self.budget.num_evicted[self.budget.of_block[block]] += 1

    def on_release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        budget = self.budget
        for position in range(start, start + count):
            block = i64(blocks[position])
            if self.ledger.ref_cnt[block] == 0 and budget.is_held[block] != 0:
                budget.is_held[block] = 0
                budget.hold(budget.of_block[block], -1)
