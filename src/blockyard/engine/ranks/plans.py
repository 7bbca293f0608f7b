"""Which modules of a model are split over ranks: its config's own plan (`base_model_tp_plan`), as far as it is linear.

What the plan does not name, or asks for in another way (experts of a mixture), is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...errors import ModelError

COLUMNS = "colwise"
ROWS = "rowwise"
COLUMNS_GATHERED = "colwise_gather_output"
ROWS_OF_WHOLE = "rowwise_split_input"
_STYLES = (COLUMNS, ROWS, COLUMNS_GATHERED, ROWS_OF_WHOLE)


def planned_modules(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Name, module and style of each module that is split: names begin at the model's base. O(modules).

    Raises `ModelError` if the config has no plan.
    """
    plan = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(f"{type(model).__name__} cannot be split over ranks: its config has no base_model_tp_plan")
    for name, module in list(model.base_model.named_modules()):
        style = plan.get(re.sub(r"\d+", "*", name))
        if style in _STYLES:
            yield name, module, style


def is_of_attention(name: str) -> bool:
    """Whether a module of this name is a part of attention, where heads are split and not single features."""
    return any("attn" in part or "attention" in part for part in name.split("."))


def is_of_kv(name: str) -> bool:
    """Whether a part of attention computes keys or values."""
    return name.rpartition(".")[2] in ("k_proj", "v_proj", "key_proj", "value_proj")
