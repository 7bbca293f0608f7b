"""From vLLM's requests to what Blockyard's pool takes: what besides tokens makes keys and values what they are."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from ... import CacheSalt, ExtraKey, LoRA, Span

#: Where vLLM's requests have a negative placeholder outside of an image, which is a token like any other to vLLM.
PLACEHOLDER = 2**31 - 1


def tokens_of(request: Any, start: int, stop: int) -> list[int]:
    """The request's tokens from `start` to `stop`, as the pool takes them."""
    tokens: list[int] = request.all_token_ids[start:stop]
    if request.mm_features and min(tokens, default=0) < 0:
        return [token if token >= 0 else PLACEHOLDER for token in tokens]
    return tokens


def extra_keys_of(request: Any, block_size: int) -> tuple[ExtraKey, ...]:
    """The request's adapter, cache salt, images and embeddings."""
    keys: list[ExtraKey] = []
    if request.lora_request:
        keys.append(LoRA(request.lora_request.name, request.lora_request.path or ""))
    if request.cache_salt:
        keys.append(CacheSalt(request.cache_salt))
    for feature in request.mm_features or ():
        place = feature.mm_position
        keys.append(Span(feature.identifier, place.offset, place.length, "mm"))
    if request.prompt_embeds is not None:
        keys += _embeddings(request, block_size)
    return tuple(keys)


def _embeddings(request: Any, block_size: int) -> list[Span]:
    """A span for each full block: vLLM makes a digest of a block's embeddings."""
    spans = []
    for block in range(len(request.prompt_embeds) // block_size):
        start = block * block_size
        extra, _ = generate_block_hash_extra_keys(request, start, start + block_size, 0)
        digest = next(key[1] for key in extra or () if key[0] == "prompt_embeds")
        spans.append(Span(digest.hex(), start, block_size, "prompt_embeds"))
    return spans
