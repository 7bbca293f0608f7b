"""A KV connector without a network: some requests find part of their prompt elsewhere, and loads may fail."""

from __future__ import annotations

import zlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

CONFIG = {"kv_connector": "Elsewhere", "kv_role": "kv_both", "kv_connector_module_path": __name__}
BLOCK_SIZE = 16


class Elsewhere(KVConnectorBase_V1):
    """Half of all requests have up to all full blocks of their prompt there; they are loaded within the step."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind those that are cached here."""
        digest = zlib.crc32(request.request_id.encode())
        most = (request.num_prompt_tokens - 1) // BLOCK_SIZE
        there = digest // 2 % (most + 1) * BLOCK_SIZE if digest % 2 else 0
        return max(0, there - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is remembered."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing is told to a worker."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """A worker's."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A worker's."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A worker's."""

    def wait_for_save(self) -> None:
        """A worker's."""
