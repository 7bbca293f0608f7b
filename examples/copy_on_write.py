"""A shared block is copied before the first write: by hand with the pool, then by the manager for a forked sequence.

A numpy array stands for the keys and values: each slot holds the token whose keys and values would be there.
Run it with: python examples/copy_on_write.py
"""

import numpy as np

from blockyard import BlockPool, CacheConfig, KVCacheManager, StepPlan

BLOCK_SIZE = 4


def share_and_copy() -> None:
    """Share the first block of a request with a second request, which then writes into it."""
    pool = BlockPool(num_blocks=21, block_size=16, enable_prefix_caching=False)  # 20 can be used
    a = pool.get_new_blocks(2, holder="A")
    block = a[0]
    print(f"A has blocks {list(a)}; block {block}: ref_cnt {pool.block(block).ref_cnt}")

    b = pool.touch(a, holder="B", start=0, stop=1)
    print(f"B shares blocks {list(b)}; block {block}: ref_cnt {pool.block(block).ref_cnt}")

    copied = pool.copy_on_write(b, 0)  # the bytes are the caller's to copy; None if B held the block alone
    print(f"before B writes, copy {copied}; A has {list(a)}, B has {list(b)}")
    print(f"block {block}: ref_cnt {pool.block(block).ref_cnt}; block {b[0]}: ref_cnt {pool.block(b[0]).ref_cnt}")
    pool.free_blocks(a)
    pool.free_blocks(b)
    pool.check()


def counts(cache: KVCacheManager, seq: int) -> str:
    """Format the blocks of a sequence, each with the number of its holders."""
    return ", ".join(f"block {block}: ref_cnt {cache.block(block).ref_cnt}" for block in cache.block_ids(seq).tolist())


def carry_out(cache: KVCacheManager, plan: StepPlan, kv: np.ndarray, seqs: list[int]) -> None:
    """Do what a data plane does: first the copies, then write the new tokens into their slots."""
    for old, new in plan.copies.tolist():
        kv[new] = kv[old]
        print(f"    copy block {old} to block {new}")
    written = [
        cache.token_ids(seq)[computed : computed + scheduled]
        for seq, computed, scheduled in zip(seqs, plan.num_computed, plan.num_scheduled, strict=True)
    ]
    kv.reshape(-1)[plan.slot_mapping] = np.concatenate(written)


def write(cache: KVCacheManager, kv: np.ndarray, seq: int, token: int) -> None:
    """Append one token to a sequence, in a step of its own."""
    cache.append([seq], [token])
    plan = cache.reserve([seq], 1)
    carry_out(cache, plan, kv, [seq])
    cache.commit([seq], plan.num_scheduled)


def fork_and_write() -> None:
    """Fork a sequence: the manager knows which blocks are shared, and its plan says what to copy."""
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=BLOCK_SIZE, max_num_seqs=2, max_model_len=16))
    kv = np.full((9, BLOCK_SIZE), -1)

    parent = cache.allocate([10, 11, 12, 13, 14, 15], holder="parent")
    plan = cache.reserve([parent], [6])
    carry_out(cache, plan, kv, [parent])
    cache.commit([parent], plan.num_scheduled)
    print(f"one sequence     {counts(cache, parent)}")

    [child] = cache.fork(parent)
    print(f"after the fork   {counts(cache, parent)}")

    write(cache, kv, child, 30)  # the child is the first to write, so it gets the copy
    print(f"after the child's token, the parent  {counts(cache, parent)}")
    print(f"                         the child   {counts(cache, child)}")
    write(cache, kv, parent, 20)  # the parent holds its last block alone again: nothing to copy

    for seq in (parent, child):
        stored = kv[cache.block_ids(seq)].reshape(-1)[: cache.num_tokens(seq)].tolist()
        print(f"    its keys and values are those of {stored}")
        assert stored == cache.token_ids(seq).tolist()
    cache.free([parent, child])
    cache.check()
    print(f"{cache.num_used_blocks} blocks leaked")


def main() -> None:
    share_and_copy()
    print()
    fork_and_write()


if __name__ == "__main__":
    main()
