"""Tests of `blockyard_engine`.

    engine     tokens compared with transformers, scheduling, preemption, sampling, beams, attention backends, ranks
    parallel   hand-overs of prompts, pools over several devices, a cache per rank; killed processes
    storage    block moves that overlap with computation
    cli        `blockyard generate`, options of the engine

Programs, from this folder: `python -m tests.handoff` (a million transfers between caches whose processes are killed),
`python -m tests.damage` (damaged messages, all of which must be refused), `python -m tests.kills`, `python -m
tests.ranks` (killed ranks).
"""
