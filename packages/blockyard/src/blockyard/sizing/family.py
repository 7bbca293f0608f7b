"""What is known of a family of models, and the fields that families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layer_rules import LayerRule, all_full
from .state_layers import StateReader

#: Sources: model files of transformers 5.19, and of vLLM (those that it has removed, in its history). UNVERIFIED: the
#: row follows from the model's fields and relatives; nobody compared it with code that runs the model.
TRANSFORMERS, VLLM, UNVERIFIED = "transformers", "vLLM", "unverified"


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose caches follow from the same fields.

    model_types: their names in configs. reads: fields that decide what a layer keeps, with the default of the class.
    rule: which layers are of which kind if no list says it. state: of a layer that has one.
    aliases: what publishers call a field that is read. harmless: fields that look as if they could change the cache.
    source: where this was read. fixed: what the class does whatever the config says.
    """

    model_types: tuple[str, ...]
    reads: Mapping[str, Any]
    rule: LayerRule = all_full
    state: StateReader | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    source: str = TRANSFORMERS
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the names that a field has in a config, the usual one first."""
        return (name, *self.aliases.get(name, ()))

    def reads_field(self, name: str) -> bool:
        """Return whether the family reads this field, under its usual name or an alias."""
        return name in self.reads or any(name in aliases for aliases in self.aliases.values())


def row(
    names: str,
    reads: Mapping[str, Any],
    rule: LayerRule = all_full,
    state: StateReader | None = None,
    **others: Any,
) -> Family:
    aliases = {key: tuple(value.split()) for key, value in others.pop("aliases", {}).items()}
    harmless = frozenset(others.pop("harmless", "").split()) - set(reads)
    return Family(tuple(names.split()), reads, rule, state, aliases=aliases, harmless=harmless, **others)


def mha(layers: int | None, hidden: int | None, heads: int | None, **more: Any) -> dict[str, Any]:
    """Fields of multi-head attention: as many KV heads as query heads, of the hidden size shared out to them."""
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **more}


def gqa(
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Fields of grouped-query attention; no KV heads are as many as query heads."""
    return {**mha(layers, hidden, heads), "num_key_value_heads": kv_heads, "head_dim": head_dim, **more}


def latent(layers: int | None, hidden: int | None, heads: int | None, rank: int, rope: int, **more: Any) -> Any:
    """Fields of latent attention: one vector for all heads, and its rotary part."""
    return {**mha(layers, hidden, heads), "kv_lora_rank": rank, "qk_rope_head_dim": rope, **more}


def windowed(reads: Mapping[str, Any], window: int | None, **more: Any) -> dict[str, Any]:
    return {**reads, "sliding_window": window, "layer_types": None, **more}
