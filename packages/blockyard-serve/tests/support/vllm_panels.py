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
#: "vllm_overview.json".
OVERVIEW: dict[str, tuple[str, ...]] = {
    "Requests / s": ("vllm:request_success_total",),
    "Input tok/s": ("vllm:prompt_tokens_total",),
    "Output tok/s": ("vllm:generation_tokens_total",),
    "5xx ratio": ("http_requests_total",),
    "TTFT p95": ("vllm:time_to_first_token_seconds",),
    "ITL p95": ("vllm:inter_token_latency_seconds",),
    "E2E p95": ("vllm:e2e_request_latency_seconds",),
    "Engines": ("vllm:num_requests_running",),
    "Running": ("vllm:num_requests_running",),
    "Waiting": ("vllm:num_requests_waiting",),
    "KV cache": ("vllm:kv_cache_usage_perc",),
    "Preemptions": ("vllm:num_preemptions_total",),
    "Prefix hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    ),
    "TTFT SLO": ("vllm:time_to_first_token_seconds",),
    "TPOT SLO": ("vllm:request_time_per_output_token_seconds",),
    "Per-model summary (selected time range)": (
        "vllm:num_requests_running",
        "vllm:request_success_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        'vllm:request_success_total{finished_reason="error"}',
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
    ),
    "Time to first token (TTFT)": ("vllm:time_to_first_token_seconds",),
    "Inter-token latency (ITL)": ("vllm:inter_token_latency_seconds",),
    "Time per output token (TPOT)": ("vllm:request_time_per_output_token_seconds",),
    "End-to-end latency": ("vllm:e2e_request_latency_seconds",),
    "Queue time": ("vllm:request_queue_time_seconds",),
    "Mean time per request phase": (
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
    ),
    "TTFT distribution": ("vllm:time_to_first_token_seconds",),
    "Inter-token latency distribution": ("vllm:inter_token_latency_seconds",),
    "End-to-end latency distribution": ("vllm:e2e_request_latency_seconds",),
    "Token throughput": (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
    ),
    "Finished requests by reason": ("vllm:request_success_total",),
    "Scheduler queue": (
        "vllm:num_requests_running",
        'vllm:num_requests_waiting_by_reason{reason="capacity"}',
        'vllm:num_requests_waiting_by_reason{reason="deferred"}',
    ),
    "KV cache usage": ("vllm:kv_cache_usage_perc",),
    "Preemptions / s": ("vllm:num_preemptions_total",),
    "Tokens per engine step": ("vllm:iteration_tokens_total",),
    "Cache hit rates": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    ),
    "Prompt tokens by source": (
        'vllm:prompt_tokens_by_source_total{source="local_compute"}',
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}',
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
    ),
    "Prompt length": ("vllm:request_prompt_tokens",),
    "Output length": ("vllm:request_generation_tokens",),
    "Finish reason share": ("vllm:request_success_total",),
    "Prompt length distribution": ("vllm:request_prompt_tokens",),
    "Output length distribution": ("vllm:request_generation_tokens",),
    "HTTP requests by status, HTTP requests by endpoint": ("http_requests_total",),
    "HTTP mean duration by endpoint": ("http_request_duration_seconds",),
}
#: "vllm_instances.json".
INSTANCES: dict[str, tuple[str, ...]] = {
    "Instances (last 5 minutes)": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:request_success_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:num_preemptions_total",
        "process_start_time_seconds",
    ),
    "Running requests": ("vllm:num_requests_running",),
    "Waiting requests": ("vllm:num_requests_waiting",),
    "KV cache usage": ("vllm:kv_cache_usage_perc",),
    "Requests / s": ("vllm:request_success_total",),
    "Input tokens / s": ("vllm:prompt_tokens_total",),
    "Output tokens / s": ("vllm:generation_tokens_total",),
    "TTFT p95": ("vllm:time_to_first_token_seconds",),
    "Inter-token latency p95": ("vllm:inter_token_latency_seconds",),
    "E2E latency p95": ("vllm:e2e_request_latency_seconds",),
    "Mean queue time": ("vllm:request_queue_time_seconds",),
    "Engine steps / s": ("vllm:iteration_tokens_total",),
    "Mean tokens per engine step": ("vllm:iteration_tokens_total",),
    "Preemptions / s": ("vllm:num_preemptions_total",),
    "Waiting requests by reason": (
        'vllm:num_requests_waiting_by_reason{reason="capacity"}',
        'vllm:num_requests_waiting_by_reason{reason="deferred"}',
    ),
    "Prefix cache hit rate": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    ),
    "CPU usage": ("process_cpu_seconds_total",),
    "Resident memory": ("process_resident_memory_bytes",),
    "Open file descriptors": (
        "process_open_fds",
        "process_max_fds",
    ),
    "Cache configuration": ("vllm:cache_config_info",),
    "Engine sleep state": (
        'vllm:engine_sleep_state{sleep_state="awake"}',
        'vllm:engine_sleep_state{sleep_state="discard_all"}',
    ),
}
#: What those dashboards draw besides, of parts that this server has not: other machines, images, weights of adapters,
#: sleep, vLLM's connectors.
ABSENT = (
    "vllm:estimated_",
    "vllm:external_prefix_cache_",
    "vllm:lora_requests_info",
    "vllm:mm_cache_",
    "vllm:num_requests_kv_fetch_by_stage",
    "vllm:nixl_",
    "vllm:kv_offload_",
    "vllm:rl_weight_update_",
    "vllm:sleep_mode_operation_",
    "vllm:simple_kv_offload_",
)
