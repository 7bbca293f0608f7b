"""Tests of `blockyard_engine`.

    engine     tokens against transformers, scheduling, preemption, sampling, beams, attention backends, ranks
    parallel   prompts handed from cache to cache, pools over several devices, a cache for each rank; killed processes
    storage    copies beside the computing
    cli        `blockyard generate`, options of the engine

Programs, from this folder: `python -m tests.handoff` (a million transfers between caches whose processes are killed),
`python -m tests.damage` (damaged messages, none of which may be believed), `python -m tests.kills`, `python -m
tests.ranks` (killed ranks).
"""
