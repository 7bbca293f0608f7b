"""The control plane: pool, prefix index, sequences, manager. It decides, and never touches a tensor.

From the bottom up (docs/architecture.md has a line on every file):

    arrays, gate, face     integer arrays; one call at a time; checks and errors of public classes
    tokens                 tokens and numbers of the caller, checked and packed
    index/                 from the tokens of a prompt to blocks: hash, verify, insert, remove
    policies/              which block is evicted
    blocks/                reference counts, the free queue, leases
    sequences/             the state of each running sequence, and in-flight prefix sharing
    watch/                 history, residency, causes of misses
    pools/                 the public pool classes: leases, then pools by tokens and by names
    store/                 which blocks have keys and values: the hashed ones (plain) or those of another pool (grouped)
    plan                   the arrays and copies that the data plane carries out
    parts                  makes the objects of a cache, and chooses its store
    checking               the invariants that need several of these together
    calls/                 the public calls, a file each: allocate, reserve, commit, fork, truncate, free, swap, …
    inspection             the queries of a cache
    manager                the public class: every call in one line

All modules here are compiled by mypyc, except `__init__` files.
"""
