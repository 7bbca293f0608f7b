"""The panels of vLLM's dashboards (examples/observability in its repository, November 2026) and the series they draw.

Read from the dashboards' own expressions. A metric's name without a suffix is a histogram, of which the sum, the count
or the buckets are drawn.
"""

from __future__ import annotations

#: "grafana.json", "performance_statistics.json" and "query_statistics.json": panels, and what each draws.
PERFORMANCE: dict[str, tuple[str, ...]] = {
    "E2E Request Latency": ("vllm:e2e_request_latency_seconds",),
    "Token Throughput": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "Inter Token Latency": ("vllm:inter_token_latency_seconds",),
    "Scheduler State": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "Time To First Token Latency": ("vllm:time_to_first_token_seconds",),
    "Cache Utilization": ("vllm:kv_cache_usage_perc",),
    "Request Prompt Length": ("vllm:request_prompt_tokens",),
    "Request Generation Length": ("vllm:request_generation_tokens",),
    "Finish Reason": ("vllm:request_success_total",),
    "Queue Time": ("vllm:request_queue_time_seconds",),
    "Requests Prefill and Decode Time": ("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
    "Max Generation Token in Sequence Group": ("vllm:request_max_num_generation_tokens",),
    "E2E Latency over Time, P99, P90, Avg, P50": ("vllm:e2e_request_latency_seconds",),
    "TTFT Over Time, P99, P90, Avg, P50": ("vllm:time_to_first_token_seconds",),
    "ITL (Time Per Output Token) Over Time, P90, P99, Avg, P50": ("vllm:inter_token_latency_seconds",),
    "TPS (Tokens Per Second) Over Time": (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:iteration_tokens_total",
    ),
    "Successful Requests Over Time, Requests Avg Rate": ("vllm:request_success_total",),
    "p50, p90, p99 Latency": ("vllm:e2e_request_latency_seconds",),
    "Input Token Size Distribution, p90, p50, Avg, p99": ("vllm:request_prompt_tokens", "vllm:prompt_tokens_total"),
}
#: "vllm_kv_cache.json".
CACHE: dict[str, tuple[str, ...]] = {
    "Max KV cache usage": ("vllm:kv_cache_usage_perc",),
    "Mean KV cache usage": ("vllm:kv_cache_usage_perc",),
    "Prefix cache hit rate": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    "Cached prompt tokens": ("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total"),
    "Preemptions / s": ("vllm:num_preemptions_total",),
    "Waiting for capacity": ('vllm:num_requests_waiting_by_reason{reason="capacity"}',),
    "KV cache usage by engine": ("vllm:kv_cache_usage_perc",),
    "Scheduler queue": (
        "vllm:num_requests_running",
        'vllm:num_requests_waiting_by_reason{reason="capacity"}',
        'vllm:num_requests_waiting_by_reason{reason="deferred"}',
    ),
    "Preemptions / s by engine": ("vllm:num_preemptions_total",),
    "Prompt tokens by source": (
        'vllm:prompt_tokens_by_source_total{source="local_compute"}',
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}',
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
    ),
    "Prefix cache hit rate by engine": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    "Cached prompt tokens by tier": (
        'vllm:prompt_tokens_cached_by_source_total{source="device"}',
        'vllm:prompt_tokens_cached_by_source_total{source="host"}',
    ),
    "Prompt and computed tokens per request": (
        "vllm:request_prompt_tokens",
        "vllm:request_prefill_kv_computed_tokens",
    ),
    "Cache hit rates": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    "Block lifetime": ("vllm:kv_block_lifetime_seconds",),
    "Idle time before eviction": ("vllm:kv_block_idle_before_evict_seconds",),
    "Block reuse gap": ("vllm:kv_block_reuse_gap_seconds",),
}
#: "vllm_speculative_decoding.json" and "vllm_service_status.json".
SERVICE: dict[str, tuple[str, ...]] = {
    "Draft acceptance rate": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "Acceptance length, Mean acceptance length": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_drafts_total",
    ),
    "Accepted tokens / s": ("vllm:spec_decode_num_accepted_tokens_total",),
    "Draft tokens / s": ("vllm:spec_decode_num_draft_tokens_total",),
    "Drafts / s": ("vllm:spec_decode_num_drafts_total",),
    "Output from drafts": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:generation_tokens_total"),
    "Status": ('vllm:engine_sleep_state{sleep_state="awake"}',),
    "Response time": ("vllm:time_to_first_token_seconds",),
    "Output speed": ("vllm:generation_tokens_total", "vllm:num_requests_running"),
    "Success rate": ('vllm:request_success_total{finished_reason="error"}',),
    "Requests / min": ("vllm:request_success_total",),
}
#: What those dashboards draw besides, of parts that this server has not: other machines, images, vLLM's connectors.
ABSENT = (
    "vllm:external_prefix_cache_",
    "vllm:mm_cache_",
    "vllm:num_requests_kv_fetch_by_stage",
    "vllm:nixl_",
    "vllm:kv_offload_",
    "vllm:simple_kv_offload_",
)
