"""The control plane: pool, free queue, prefix index, sequences, manager. It decides and never touches a tensor.

Read it bottom-up, a file at a time:

    arrays                    fixed-length integer arrays, and the read-only views that callers get
    gate, serials, refusing   one call at a time; numbers that no two managers share; what cannot be copied
    tokens, prompt            whatever a caller calls tokens, packed two to a word; with its keys and spans
    hashing                   the chained hash that finds a candidate
    prefix_index, index_room  tokens and identities that verify it; the arrays of a larger index
    roots, children           what stands before a first block; what continues a content
    free_queue, block_queue   who is evicted next; the same, checked, for people
    policies, choosing        who else might be; between a policy and the pool
    block_ledger              reference counts over all of these: it believes its callers
    lease, block, block_pool  what the pool hands out; what people look at; the pool's checked face
    observer, history, residency, misses    told what happens to blocks
    block_table, sequences    rows of block ids; what is known of each running sequence
    hit, hit_holder           what a lookup found, handed on; held while a policy is asked
    joining                   sequences that share blocks still being computed
    content_pool, group_table, mapping      layer groups: from a page's content to the blocks that store it
    transfers, cpu_tier, swapping           the CPU pool, and the moves between it and the pool
    plan                      what the data plane carries out
    admitting, reserving, committing, branching, ending    what the calls do; a free begins in `ending`
    checking                  the invariants that need several of these together
    view, manager             all that can be asked of a cache; all that can be done with it

All modules here are compiled by mypyc, except `__init__` files.
"""
