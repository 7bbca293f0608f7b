"""Tests of `blockyard_sglang`.

integrations   over a small SGLang: lookups, locks, evictions, refusals
interop        SGLang's own cache beside ours, and its unit tests (`make interop-sglang`)
"""
