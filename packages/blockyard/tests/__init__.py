"""Tests of `blockyard`, which need no torch, no Ray and no browser. What is tested where:

    package    configuration, errors, extra keys, names; which build runs; what every compiled source must look like
    pool       blocks alone: free queue, reference counts, prefix index, hash, collisions, resizing
    core       sequences: admission, allocate, reserve, commit, forks and copy-on-write (test_forks), partial hits,
               in-flight sharing, layer groups and windows, swap and CPU pool, plans, bad input; whole random programs
               (test_world, test_manager_model, test_stress, test_layouts); calls inside of calls, finalisers,
               interrupts, hostile arguments
    policies   the contract of eviction policies, their exact orders, broken ones, retention
    observe    history, residency, causes of misses, leaks, the picture and the report
    metrics    what Prometheus reads of a cache
    sizing     bytes of a block, how many fit
    events     KV events: the wire, the publisher, and a mirror over a network that loses messages
    storage    KV tensors, layouts, copies (with torch)
    cli        progress bars
    interop    Dynamo's indexer as a judge of KV events (`make interop`)
    support    what several of them share; what other packages' tests need too is `blockyard_testing`

Programs, from this folder: `python -m tests.stress` (a million random operations), `python -m blockyard_testing.world`
(many random worlds), `python -m tests.pools` (many walks over pools alone), `python -m tests.wires` (the same followed
by a mirror over a network that loses), `python -m tests.nomemory` (one failed allocation at each point of a call). And
attacks, of which the tests make a small part: `python -m tests.finalisers` (garbage that frees in the middle of calls),
`python -m tests.interrupts` (Ctrl-C at every event of every call), `python -m tests.signals` (the same by a timer),
`python -m tests.hostile` (arguments that act when they are read).
"""
