"""Details on request: one block, or a run of blocks."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.extending import KVCacheBlock

from .call_queue import EngineStatus
from .frames import Frame

#: Decodes lists of token ids, each to one text.
Texts = Callable[[Sequence[Sequence[int]]], Awaitable[list[str]]]
#: Maximum of blocks in a run, and of holders and tokens shown of a block.
MAX_RUN = 1024
_MAX_HOLDERS = 64
_MAX_SHOWN_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SeenBlock:
    """A block between two steps.

    Attributes:
        names: display names of its holders.
        step: number of steps so far.
        is_plain: whether its tokens identify its content: one layer group without a window, and no CPU pool.
    """

    block: KVCacheBlock
    names: list[str]
    step: int
    is_plain: bool


def read_config(cache: KVCacheManager, status: EngineStatus) -> dict[str, Any]:  # noqa: ARG001
    """Return the constant settings of a cache. Only in its thread. O(groups)."""
    config = cache.config
    return {
        "block_size": cache.block_size,
        "groups": [group.name for group in config.layer_groups],
        "tracks_misses": config.observe.track_misses,
    }


def read_block(block_id: int, cache: KVCacheManager, status: EngineStatus) -> SeenBlock | None:
    """Return a block, or None if the id does not exist. Only in the cache's thread. O(held blocks)."""
    if not 1 <= block_id < len(cache.pool.ref_counts()):
        return None
    block = cache.block(block_id)
    known = status.names
    names = [_named(holder, known) for holder in block.holders[:_MAX_HOLDERS]]
    return SeenBlock(block, names, status.step, not cache.config.is_mapped)


async def block_answer(seen: SeenBlock, texts: Texts | None, shows_text: bool) -> dict[str, Any]:
    """Return a block for the page. `texts` is None without a tokenizer; `shows_text` allows prompts."""
    block = seen.block
    answer: dict[str, Any] = {
        "id": block.block_id,
        "step": seen.step,
        "ref_cnt": block.ref_cnt,
        "is_cached": block.is_cached,
        "is_computed": block.is_computed,
        "num_tokens": block.num_tokens,
        "group": block.group,
        "holders": seen.names,
        "num_holders": len(block.holders),
        "tokens": None,
        "pieces": None,
        "text": None,
    }
    if not shows_text:
        return answer
    tokens = block.token_ids[:_MAX_SHOWN_TOKENS]
    answer["tokens"] = tokens
    if texts is not None and tokens:
        text, *pieces = await texts([tokens, *([token] for token in tokens)])
        answer |= {"text": text, "pieces": pieces}
    return answer


def run_answer(frame: Frame, ref_counts: NDArray[np.int32], first: int, count: int) -> dict[str, Any]:
    """Return the states (base64, a byte each) and reference counts of `count` blocks from `first` on. O(count)."""
    end = min(first - 1 + min(count, MAX_RUN), len(frame.states))
    states = frame.states[first - 1 : end]
    return {
        "n": frame.number,
        "first": first,
        "states": base64.b64encode(states.tobytes()).decode("ascii"),
        "counts": ref_counts[first - 1 : end].tolist(),
    }


def _named(holder: str, names: Mapping[str, str]) -> str:
    """Return a holder's display name: its inner name and the name that the client gave."""
    start = holder.find("'")
    inner = holder[start + 1 : -1] if start >= 0 and holder.endswith("'") else holder
    name = names.get(inner, "")
    return f"{inner or holder or 'a lease'} ({name})" if name else inner or holder or "a lease"
