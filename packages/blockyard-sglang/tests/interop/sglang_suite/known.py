"""Which of SGLang's tests fail on Blockyard and why; none fails because of the cache's behaviour."""

from __future__ import annotations

FILE = "test/registered/unit/mem_cache/test_radix_cache_unit.py"

_DISABLED = "asks for a disabled cache, which is refused by name"
_EVENTS = "asks for KV events, which are refused by name"
_SLOTS = "gives pages slots that do not lie side by side, or slot 0, which SGLang's allocators do not hand out"
_NO_VALUE = "gives no slots: SGLang's cache takes the token ids then, for tests"
_TEST = "test_radix_cache_unit.py::TestRadixCache::"

KNOWN: dict[str, str] = {
    f"{_TEST}test_insert_and_match_basic": _DISABLED,
    f"{_TEST}test_hash_value_split": _EVENTS,
    f"{_TEST}test_hash_value_storage": _EVENTS,
    f"{_TEST}test_kv_cache_events_with_eviction": _EVENTS,
    f"{_TEST}test_hash_value_repeating_tokens": _EVENTS,
    f"{_TEST}test_block_hashes_are_isolated_by_extra_key": _EVENTS,
    f"{_TEST}test_kv_cache_events": _EVENTS,
    f"{_TEST}test_init_variations": _EVENTS,
    f"{_TEST}test_insert_with_none_value": _NO_VALUE,
    f"{_TEST}test_advanced_prefix_match_with_node_splits": _SLOTS,
    f"{_TEST}test_page_alignment_boundary": _SLOTS,
}
