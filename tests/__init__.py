"""Blockyard's tests, a room for each part of the package. What is tested where:

    package    configuration, errors, extra keys, names; which build runs; what every source must look like
    pool       blocks alone: free queue, reference counts, prefix index, hash, collisions, resizing
    core       sequences: admission, allocate, reserve, commit, forks and copy-on-write (test_forks), partial hits,
               joins, layer groups and windows, swap and CPU tier, plans, bad input; whole random programs (test_world,
               test_manager_model, test_stress, test_layouts); calls inside of calls, finalisers, interrupts, hostile
               arguments
    policies   the contract of eviction policies, their exact orders, broken ones, retention
    observe    history, residency, causes of misses, leaks, the picture and the report
    metrics    what Prometheus is told of a cache, the dashboard and the alerts that ship
    sizing     bytes of a block, how many fit
    events     KV events: what is on the wire, the publisher, and a mirror behind a network that loses messages
    storage    KV tensors, layouts, copies, moves beside the computing
    parallel   prompts handed from cache to cache, pools over several devices, a cache for each rank; killed processes
    tiers      objects in files, Redis and buckets: damage, faults, full disks, killed processes (`torture`); what binds
               them to a manager, in random worlds with a faulty tier (`offload_world`)
    engine     tokens against transformers, scheduling, preemption, sampling, beams, attention backends, CUDA
    serving    the HTTP server: answers, fields, paths, bad requests, failures, its log, metrics and traces, load
    live       the page: states, the wire, its paths, and the page itself in a headless browser
    fleet      the router over replicas: costs, its book, choices over real publishers; answers whose replicas are lost;
               `blockyard fleet serve` as it is started (with the extra `fleet`)
    lab        traces, curves and their pictures, replays, capacity plans
    cli        the `blockyard` command
    benchmarks what the benchmarks measure with: aged pools, traces, builds in turns
    docs       what the README, the pages and the docstrings show runs
    integrations   adapters for other engines, without the engines: vLLM's signatures, options, imports; a small
               tier in the place of vLLM's, for our policies in it
    interop    other systems' own programs beside ours (`make interop`): Dynamo's indexer; vLLM's own tests on Blockyard
               (`make interop-vllm`), and our policies in its CPU tier; SGLang's radix cache beside ours
               (`make interop-sglang`), LMCache (`make interop-lmcache`); a fleet on Ray (`make interop-ray`); tiers on
               real servers stand in tiers (`make interop-tiers`)
    support    what several of them share: the reference model, random programs, tiny models, servers

A package, so that programs run from the repository's root: `python -m tests.stress` (a million random operations),
`python -m tests.world` (many random worlds), `python -m tests.pools` (many walks over pools alone), `python -m
tests.wires` (the same told to a mirror over a network that loses), `python -m tests.handoff` (a million transfers
between caches whose processes are killed), `python -m tests.damage` (damaged messages, none of which may be believed),
`python -m tests.fleet.chaos` (a fleet whose replicas are killed and stopped), `python -m tests.tiers.torture` (jobs on
tiers whose processes and servers are killed), `python -m tests.nomemory` (one failed allocation at each place of a
call), `python
-m tests.golden` (hits of every policy, counted anew), `python -m tests.frame_rate` (how often the page draws), `python
-m tests.wheels` (builds wheels and tests each where there is no compiler). And attacks, of which the tests make a small
part: `python -m tests.finalisers` (garbage that frees in the middle of calls), `python -m tests.interrupts` (Ctrl-C at
every event of every call), `python -m tests.signals` (the same by a timer), `python -m tests.hostile` (arguments that
act when they are read).
"""
