"""The control plane: pool, free queue, prefix index, sequences, manager. It decides and never touches a tensor.

Read it bottom-up, a file at a time:

    arrays         fixed-length integer arrays and the views that leave the house
    tokens         whatever a caller calls tokens, packed two to a word
    hashing        the chained hash that finds a candidate
    prefix_index   tokens and identities that prove it
    free_queue     who is evicted next
    lease, block   what the pool hands out; what people look at
    block_pool     reference counts over all of these
    sequences      a row of block ids for each running sequence
    joining        sequences that share blocks still being computed
    plan           what the data plane carries out
    manager        the two-phase life of a sequence

All modules here are compiled by mypyc, except this one.
"""
