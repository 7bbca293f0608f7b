"""vLLM's own tests of its scheduler and block manager, stock and on Blockyard: `python -m tests.interop.vllm_suite`."""
