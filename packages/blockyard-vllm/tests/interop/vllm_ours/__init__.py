"""Our own tests of vLLM's schedulers on Blockyard: `python -m tests.interop.vllm_suite.ours --python PYTHON`.

They are run by an interpreter with vLLM; elsewhere they are skipped.
"""
