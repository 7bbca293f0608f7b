"""Tests of `blockyard_lab`.

    lab        traces, curves and their pictures, replays, simulated fleets
    sizing     capacity plans against published start-up logs
    cli        `blockyard replay`, `curve`, `plan`, `fleet`

`python -m tests.golden` prints the hits of every policy anew, for a policy that changed on purpose.
`MOONCAKE_TRACE=FILE` compares the lab with the published numbers for the Mooncake conversation trace.
"""
