"""Which of vLLM's tests run, and which fail on Blockyard and why; none fails because of the cache's behaviour."""

from __future__ import annotations

#: Need the weights of models.
LEFT_OUT = (
    "tests/v1/core/test_scheduler_e2e.py",
    "tests/v1/core/test_reset_prefix_cache_e2e.py",
    "tests/v1/core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
)
CORE = "tests/v1/core"

_UNIT = "tests/v1/kv_connector/unit"
#: Of the connectors, what needs neither weights nor a network: with one of them set, level "tokens" is refused.
LOADS = tuple(
    f"{_UNIT}/test_{name}.py"
    for name in (
        "cache_pollution_prevention",
        "decode_bench_connector",
        "error_propagation",
        "invalid_blocks_correctness",
        "kv_connector_lifecycle",
        "kv_load_failure_recovery",
        "multi_connector",
        "remote_decode_lifecycle",
        "remote_prefill_lifecycle",
    )
)
CONNECTORS = (
    *LOADS,
    f"{_UNIT}/offloading_connector",
    f"{_UNIT}/test_nixl_simple_cpu_offload.py",
    f"{_UNIT}/test_output_aggregator.py",
    f"{_UNIT}/test_simple_cpu_offload_connector.py",
)

_DICT = "changes vLLM's dict from hashes to blocks, `_cache`, from outside; here it is a view of the index"
_MADE = "gives the pool a block of id 0, the null block's, that the pool has not made, to be cached"

KNOWN: dict[str, str] = {
    "test_prefix_caching.py::test_prefill_hybrid_model": _DICT,
    "test_prefix_caching.py::test_prefill_hybrid_model_eagle": _DICT,
    "test_prefix_caching.py::test_eagle_with_sliding_window": _DICT,
    "test_single_type_kv_cache_manager.py::test_chunked_local_attention_possible_cached_prefix": _DICT,
    "test_single_type_kv_cache_manager.py::test_sliding_window_possible_cached_prefix": _DICT,
    "test_prefix_caching.py::test_cache_blocks[sha256]": _MADE,
    "test_prefix_caching.py::test_cache_blocks[sha256_cbor]": _MADE,
    "test_prefix_caching.py::test_cache_blocks_multi_group": _MADE,
    "test_prefix_caching.py::test_maybe_evict_cached_block": _MADE,
    "test_deferred_block_free.py::test_cow_retentions_deferred_until_copy_step_processed": (
        "puts copies into a list of vLLM's manager for groups with states, which level 'tokens' has not got"
    ),
}

_FULL = "sets the counter of vLLM's free queue to 0, so that the pool looks full; here the pool itself is asked"
KNOWN_OF_CONNECTORS: dict[str, str] = {
    "test_scheduler.py::test_request_preemption[True]": _FULL,
    "test_scheduler.py::test_request_preemption[False]": _FULL,
    "test_scheduler.py::test_async_preempt_readmit_before_transfer_output_is_deferred": _FULL,
}
