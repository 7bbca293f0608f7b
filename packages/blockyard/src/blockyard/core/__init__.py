"""The control plane: pool, prefix index, sequences, manager. It decides and never touches a tensor.

From the bottom up (docs/architecture.md has a line on every file):

    arrays, gate, face     integer arrays; one call at a time; what cannot be copied
    tokens                     what a caller gives as tokens or numbers, checked and packed
    index/                     from the tokens of a prompt to blocks: hash, verify, insert, remove
    policies/                  which block is evicted
    blocks/                    who holds each block, which are free, who goes next; leases
    sequences/                 what is known of each running sequence, and who waits for whom
    watch/                     history, residency, causes of misses
    pools/                     the public pool classes: leases, then what knows tokens, and what knows names
    store/                     where keys and values are: in the hashed blocks (plain), or below them (grouped)
    plan                       what the data plane carries out
    parts                      how a cache is put together, and the one place where its store is chosen
    checking                   the invariants that need several of these together
    calls/                     the public verbs, a file each: allocate, reserve, commit, fork, truncate, free, swap, …
    inspection                 what can be asked of a cache
    manager                    its public face: every call in one line

All modules here are compiled by mypyc, except `__init__` files.
"""
