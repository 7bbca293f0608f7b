"""A family of models, and the fields that families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layer_rules import LayerRule, all_full
from .state_layers import StateReader

#: Sources: model files of transformers 5.19, and of vLLM (removed ones from its history). UNVERIFIED: inferred from the
#: model's fields and related models, and not compared with code that runs the model.
TRANSFORMERS, VLLM, UNVERIFIED = "transformers", "vLLM", "unverified"


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose caches are computed from the same fields.

    Attributes:
        model_types: their names in configs.
        reads: fields that determine the size of a layer's cache, with the class's defaults.
        rule: kinds of the layers if no list in the config gives them.
        state: function that reads the state of a layer that has one.
        aliases: other names of fields, by field.
        harmless: fields that look relevant to the cache but are not.
        source: where the row was taken from.
        fixed: properties of the class that no field changes.
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
        """Return the names of a field in configs, the usual one first."""
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
    """Return fields of multi-head attention: as many KV heads as query heads, and hidden_size / heads elements each."""
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **more}


def gqa(
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return fields of grouped-query attention. If `kv_heads` is None there are as many as query heads."""
    return {**mha(layers, hidden, heads), "num_key_value_heads": kv_heads, "head_dim": head_dim, **more}


def latent(layers: int | None, hidden: int | None, heads: int | None, rank: int, rope: int, **more: Any) -> Any:
    """Return fields of latent attention: one vector for all heads, and its rotary part."""
    return {**mha(layers, hidden, heads), "kv_lora_rank": rank, "qk_rope_head_dim": rope, **more}


def windowed(reads: Mapping[str, Any], window: int | None, **more: Any) -> dict[str, Any]:
    return {**reads, "sliding_window": window, "layer_types": None, **more}
