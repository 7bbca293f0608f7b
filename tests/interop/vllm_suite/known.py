"""Which of vLLM's tests are run, and which fail on Blockyard, with the reason: none for what it does."""

from __future__ import annotations

#: Need the weights of models.
LEFT_OUT = (
    "tests/v1/core/test_scheduler_e2e.py",
    "tests/v1/core/test_reset_prefix_cache_e2e.py",
    "tests/v1/core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
)
CORE = "tests/v1/core"

KNOWN: dict[str, str] = {}
