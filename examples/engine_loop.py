"""An engine's loop in sixty lines, with the manager alone: chunked prefill, decoding, a fork and preemption.

There is no model: tokens are random, and a numpy array stands for the KV tensors. It stores for each slot the token
whose keys and values would be there, so that a wrong mapping would show as a wrong token. serve_prompts.py is the same
with a real model. Run it with: python examples/engine_loop.py
"""

import random

import numpy as np

from blockyard import Admission, CacheConfig, KVCacheManager, SeqStatus

BLOCK_SIZE, BUDGET, NEW_TOKENS = 4, 12, 12


def main() -> None:
    """Serve twelve requests that share a beginning, with too few blocks for all of them."""
    chooser = random.Random(0)
    cache = KVCacheManager(CacheConfig(num_blocks=20, block_size=BLOCK_SIZE, max_num_seqs=13, max_model_len=64))
    kv = np.full((20, BLOCK_SIZE), -1)
    shared = [chooser.randrange(1000) for _ in range(10)]
    prompts = [shared + [chooser.randrange(1000) for _ in range(5)] for _ in range(12)]
    waiting = [(prompt, len(prompt) + NEW_TOKENS, False) for prompt in prompts]  # tokens, length at the end, ran before
    running: dict[int, int] = {}  # handle: the length at which it ends
    num_steps = num_preempted = num_forked = 0
    while waiting or running:
        num_steps += 1
        seqs = list(running)
        left = cache.num_tokens(seqs) - cache.num_computed_tokens(seqs)
        # A step has BUDGET tokens, the oldest sequence first; one that gets none of them is asked for 0.
        plan = cache.reserve(seqs, np.diff(np.minimum(np.cumsum(left), BUDGET), prepend=0))

        for old, new in plan.copies.tolist():
            kv[new] = kv[old]
        kv.reshape(-1)[plan.slot_mapping] = plan.input_ids  # "the model": it takes plan.positions too
        for row, table in enumerate(plan.block_tables):  # "attention": every sequence reads its own tokens back
            if plan.fits[row]:
                length = plan.seq_lens[row]
                assert (kv[table].reshape(-1)[:length] == cache.token_ids(seqs[row])[:length]).all()

        at_end = left == plan.num_scheduled
        sampled = [chooser.randrange(1000) if end else -1 for end in at_end]
        is_forked = num_forked == 0 and bool(at_end[:1].any())  # a second answer to the first request
        if is_forked:
            sampled[0] = -1  # a fork has its parent's tokens: the answers get theirs afterwards
        short_of_blocks = bool((plan.status == SeqStatus.NO_BLOCKS).any())
        cache.commit(seqs, plan.num_scheduled, sampled)

        if is_forked:  # the blocks are shared; each answer samples its own first token from the same logits
            answers = [seqs[0], *cache.fork(seqs[0])]
            cache.append(answers, [chooser.randrange(1000) for _ in answers])
            print(f"one prompt, answers that begin with {[int(cache.token_ids(seq)[-1]) for seq in answers]}")
            running[answers[1]] = running[seqs[0]]
            num_forked += 1
        for seq in [seq for seq in running if cache.num_tokens(seq) >= running[seq]]:
            cache.free(seq)
            del running[seq]
        if short_of_blocks and running:
            victim = list(running)[-1]
            waiting.insert(0, (cache.token_ids(victim), running.pop(victim), True))
            cache.free(victim)
            num_preempted += 1
        while waiting and not short_of_blocks:
            tokens, end, ran = waiting[0]
            answer = cache.try_allocate(tokens, resumed=ran)
            if answer is Admission.LATER:
                break
            if answer is Admission.NEVER:
                raise SystemExit(f"{len(tokens)} tokens are too many for the pool")
            running[answer] = end
            waiting.pop(0)
        cache.check()
    stats = cache.stats()
    print(f"{num_steps} steps, {num_preempted} preempted, {stats.num_hit_tokens} tokens from the cache,")
    print(f"{num_forked} forked with {stats.num_copied_blocks} blocks copied on write,")
    print(f"{stats.num_used_blocks} blocks leaked")


if __name__ == "__main__":
    main()
