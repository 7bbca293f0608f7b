"""Two continuations of one prompt: blocks are shared, and copied by the first to write. The bytes move, too.

A numpy array stands for the keys and values: each slot holds the token whose keys and values would be there.
Run it with: python examples/copy_on_write.py
"""

import numpy as np

from blockyard import CacheConfig, KVCacheManager, StepPlan

BLOCK_SIZE = 4


def counts(cache: KVCacheManager, seq: int) -> str:
    """The blocks of a sequence with the number of their holders."""
    return ", ".join(f"block {block}: ref_cnt {cache.block(block).ref_cnt}" for block in cache.block_ids(seq).tolist())


def carry_out(cache: KVCacheManager, plan: StepPlan, kv: np.ndarray, seqs: list[int]) -> None:
    """What a data plane does: copies first, then the new tokens into their slots."""
    for old, new in plan.copies.tolist():
        kv[new] = kv[old]
        print(f"    copy block {old} to block {new}")
    written = [
        cache.token_ids(seq)[computed : computed + scheduled]
        for seq, computed, scheduled in zip(seqs, plan.num_computed, plan.num_scheduled, strict=True)
    ]
    kv.reshape(-1)[plan.slot_mapping] = np.concatenate(written)


def main() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=BLOCK_SIZE, max_num_seqs=2, max_model_len=16))
    kv = np.full((9, BLOCK_SIZE), -1)

    parent = cache.allocate([10, 11, 12, 13, 14, 15], holder="parent")
    plan = cache.reserve([parent], [6])
    carry_out(cache, plan, kv, [parent])
    cache.commit([parent], plan.num_scheduled)
    print(f"one sequence     {counts(cache, parent)}")

    [child] = cache.fork(parent)
    print(f"after the fork   {counts(cache, parent)}")

    pair = [parent, child]
    cache.commit(pair, 0, [20, 30])  # each gets a token of its own
    plan = cache.reserve(pair, 1)
    carry_out(cache, plan, kv, pair)
    cache.commit(pair, plan.num_scheduled)
    print(f"after a token, the parent  {counts(cache, parent)}")
    print(f"               the child   {counts(cache, child)}")

    for seq in pair:
        stored = kv[cache.block_ids(seq)].reshape(-1)[: cache.num_tokens(seq)].tolist()
        print(f"    its keys and values are those of {stored}")
        assert stored == cache.token_ids(seq).tolist()
    cache.free(pair)
    cache.check()
    print(f"{cache.num_used_blocks} blocks leaked")


if __name__ == "__main__":
    main()
