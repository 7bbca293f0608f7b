"""Fields of OpenAI's and vLLM's requests that have no effect: harmless ones are ignored, others are refused by name.

A field that would change the answer must not be ignored, or the client would not get the answer it asked for. Its
default value asks for nothing and passes, because many clients send every default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ApiError, invalid

#: Fields that do not affect the answer.
HARMLESS = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

#: Unsupported fields, with their accepted values, which request nothing (null is always accepted).
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "adapter_id": ("",),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": ("",),
    "lora_name": ("",),
    "lora_path": ("",),
    "lora_request": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (),
    "web_search_options": (),
}
#: Some defaults depend on the route: a chat template adds the special tokens itself.
REFUSED_IN_COMPLETIONS = {**REFUSED, "add_special_tokens": (True,), "add_generation_prompt": (True,)}
REFUSED_IN_CHATS = {**REFUSED, "add_special_tokens": (False,), "add_generation_prompt": (True,)}

#: Fields of messages in OpenAI's API, most of them for tools.
REFUSED_IN_MESSAGES = frozenset({"audio", "function_call", "refusal", "tool_call_id", "tool_calls"})

_NO_LORA = "it serves one model and loads no LoRA adapters"
_NO_SCHEMA = "it cannot constrain answers to a schema"
_NO_TOOLS = "it does not pass tools to the model"
_REASONS = {
    **dict.fromkeys(("adapter_id", "lora", "lora_name", "lora_path", "lora_request"), _NO_LORA),
    **dict.fromkeys(("response_format", "structured_outputs"), _NO_SCHEMA),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), _NO_SCHEMA),
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _NO_TOOLS),
}


def requested_fields(fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> dict[str, Any]:
    """Return the fields without nulls, harmless fields, and unsupported ones with accepted values. O(fields).

    Raises `ApiError` (400), with the field, for one that is not supported: a name in `refused` with a value that is not
    listed there.
    """
    requested = {}
    for name, value in fields.items():
        if value is None or name in HARMLESS:
            continue
        if name not in refused:
            requested[name] = value
        # False equals 0 in Python, but a field that expects a number must not accept a bool as its neutral value.
        elif not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in refused[name]):
            raise unsupported(name)
    return requested


def unsupported(name: str, shown: str | None = None) -> ApiError:
    """Return a 400 error for a field that is known but not supported.

    Args:
        name: the field.
        shown: its path in the request, if not `name`.
    """
    why = f": {_REASONS[name]}" if name in _REASONS else ""
    path = shown or name
    return invalid(f"'{path}' is not supported by this server{why}", path, "unsupported_parameter")
