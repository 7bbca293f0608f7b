"""Paths of OpenAI's and vLLM's APIs that this server does not have, and why: a bare 404 would not say."""

from __future__ import annotations

_WHY = {
    "/docs": "docs/serving.md describes its paths and fields",
    "/v1/embeddings": "its model generates text, and no embeddings",
    "/v1/responses": "it has the chat and completion paths alone",
    "/v1/audio": "it reads and writes text alone",
    "/v1/images": "it reads and writes text alone",
    "/v1/moderations": "it judges no text",
    "/v1/rerank": "it judges no text",
    "/v1/score": "it judges no text",
    "/v1/files": "it keeps nothing for clients",
    "/v1/batches": "it keeps nothing for clients",
    "/v1/fine_tuning": "it trains nothing",
    "/v1/load_lora_adapter": "it has one model and loads no LoRA adapters",
    "/v1/unload_lora_adapter": "it has one model and loads no LoRA adapters",
}
_OUTSIDE = "OpenAI's paths begin with /v1/ here"


def why_absent(path: str) -> str | None:
    """The rest of the sentence for a path that leads nowhere; None for one that means nothing to any server."""
    for known, why in _WHY.items():
        if path == known or path.startswith(f"{known}/"):
            return f"this server does not have it: {why}"
    return None if path.startswith("/v1/") else _OUTSIDE
