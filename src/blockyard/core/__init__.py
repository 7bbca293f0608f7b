"""The control plane: pool, free queue, prefix index, sequences, manager. It decides and never touches a tensor.

Read it bottom-up, a file at a time:

    arrays                    fixed-length integer arrays and the views that leave the house
    tokens, prompt            whatever a caller calls tokens, packed two to a word; with its keys and spans
    hashing                   the chained hash that finds a candidate
    prefix_index, children    tokens and identities that prove it; what continues a content
    free_queue                who is evicted next
    policies, choosing        who else might be; between a policy and the pool
    lease, block              what the pool hands out; what people look at
    block_ledger, block_pool  reference counts over all of these; the same with leases
    observer, history, residency, misses    whoever is told what happens to blocks
    block_table, sequences    rows of block ids; what is known of each running sequence
    joining                   sequences that share blocks still being computed
    content_pool, group_table, mapping      layer groups: from a page's content to the blocks that store it
    transfers, cpu_tier, swapping           the CPU pool, and the moves between it and the pool
    plan                      what the data plane carries out
    admitting, reserving, committing, branching    what the calls do
    checking                  the laws that need several of these together
    view, manager             all that can be asked of a cache; all that can be done with it

All modules here are compiled by mypyc, except `__init__` files.
"""
