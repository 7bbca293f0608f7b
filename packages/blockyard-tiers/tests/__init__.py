"""Tests of `blockyard_tiers`.

    tiers      objects in files, Redis, buckets and peers: damage, faults, full disks, killed processes (`torture`)
    interop    LMCache's storage manager on our tiers (`make interop-lmcache`)

`python -m tests.tiers.torture` runs jobs on tiers whose processes and servers are killed. `make interop-tiers` runs all
of it on real servers. `python -m tests.tiers.interrupts` (Ctrl-C at every event), `tests.tiers.nomemory` (one failed
allocation) and `tests.tiers.hostile_arguments` make every public call on an offload in the middle of its work
(`offload_site`).
"""
