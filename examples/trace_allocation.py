"""What one request does to the pool, step by step: 50 prompt tokens in blocks of 16, four generated tokens, the end.

The pool has 11 blocks, of which 10 can be used: block 0 is the null block.
Run it with: python examples/trace_allocation.py
"""

from blockyard import CacheConfig, KVCacheManager

BLOCK_SIZE = 16


def show(cache: KVCacheManager, what: str) -> None:
    """Print one line: the event, and where the blocks are after it."""
    print(f"{what:<38} {cache.num_used_blocks} used, {cache.num_free_blocks} free, {cache.num_cached_blocks} cached")


def main() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=11, block_size=BLOCK_SIZE, max_num_seqs=2, max_model_len=128))
    prompt = list(range(50))
    show(cache, "an empty pool")

    seq = cache.allocate(prompt, holder="the request")
    show(cache, "allocate 50 tokens")  # full blocks are indexed at once: an equal prompt joins them and waits
    table = cache.block_ids(seq).tolist()
    for position, block in enumerate(table):
        first = position * BLOCK_SIZE
        num_tokens = min(BLOCK_SIZE, len(prompt) - first)
        holders = f"ref_cnt {cache.block(block).ref_cnt}"
        print(f"    logical block {position} -> block {block}, {holders}: tokens {first} to {first + num_tokens - 1}")

    plan = cache.reserve([seq], [len(prompt)])  # the whole prompt in one step
    slots = plan.slot_mapping.tolist()
    print(f"    token 17 is at offset 1 of logical block 1: slot {table[1]} * {BLOCK_SIZE} + 1 = {slots[17]}")
    cache.commit([seq], plan.num_scheduled, [2000])
    show(cache, "compute the prompt, sample a token")

    for token in range(2001, 2005):
        plan = cache.reserve([seq], [1])
        cache.commit([seq], plan.num_scheduled, [token])
    show(cache, "four decode steps")  # none needed a new block: the fourth had room
    wasted = cache.stats().num_wasted_slots
    print(f"    {cache.num_tokens(seq)} tokens in {len(cache.block_ids(seq))} blocks waste {wasted} slots")

    cache.free(seq)
    show(cache, "free")
    again = cache.allocate(prompt, holder="the same prompt")
    show(cache, "allocate the same 50 tokens")
    print(f"    {cache.num_computed_tokens(again)} of them are cached; blocks {cache.block_ids(again).tolist()}")
    cache.free(again)
    cache.check()


if __name__ == "__main__":
    main()
