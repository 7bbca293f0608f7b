"""Tests of `blockyard_vllm`.

integrations   without vLLM: signatures, options, what is read of results
interop        with vLLM: its own tests on Blockyard, our tests of its schedulers, its CPU tier (`make interop-vllm`)
"""
