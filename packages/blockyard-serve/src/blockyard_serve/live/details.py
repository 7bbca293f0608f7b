"""What is asked for when the reader points at a thing: one block, a run of blocks."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.extending import KVCacheBlock

from .desk import Surroundings
from .frames import Frame

#: Lists of token ids to their texts, one each.
Texts = Callable[[Sequence[Sequence[int]]], Awaitable[list[str]]]
#: Blocks of a run, holders and tokens of a block that are told.
MAX_RUN = 1024
_MAX_HOLDERS = 64
_MAX_SHOWN_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SeenBlock:
    """A block between two steps. names: of its holders, as the page shows them. is_plain: token blocks hold the keys
    and values themselves: one layer group without a window, and no CPU pool."""

    block: KVCacheBlock
    names: list[str]
    step: int
    is_plain: bool


def see_config(cache: KVCacheManager, around: Surroundings) -> dict[str, Any]:  # noqa: ARG001
    """Return what does not change, in the cache's thread. O(groups)."""
    config = cache.config
    return {
        "block_size": cache.block_size,
        "groups": [group.name for group in config.layer_groups],
        "tracks_misses": config.observe.track_misses,
    }


def see_block(block_id: int, cache: KVCacheManager, around: Surroundings) -> SeenBlock | None:
    """One block, in the cache's thread; None where there is none of this id. O(running sequences * their blocks)."""
    if not 1 <= block_id < len(cache.pool.ref_counts()):
        return None
    block = cache.block(block_id)
    known = around.names
    names = [_named(holder, known) for holder in block.holders[:_MAX_HOLDERS]]
    return SeenBlock(block, names, around.step, not cache.config.is_mapped)


async def block_answer(seen: SeenBlock, texts: Texts | None, shows_text: bool) -> dict[str, Any]:
    """Return a block for the page. texts: None where there is no tokenizer. shows_text: whether prompts may be seen."""
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
    """The states of blocks `first` and following at a frame, base64 of a byte each, and their counts. O(count)."""
    end = min(first - 1 + min(count, MAX_RUN), len(frame.states))
    states = frame.states[first - 1 : end]
    return {
        "n": frame.number,
        "first": first,
        "states": base64.b64encode(states.tobytes()).decode("ascii"),
        "counts": ref_counts[first - 1 : end].tolist(),
    }


def _named(holder: str, names: Mapping[str, str]) -> str:
    """ "sequence 12 'request 3'" is "request 3" on the page, and what its client called it."""
    start = holder.find("'")
    inner = holder[start + 1 : -1] if start >= 0 and holder.endswith("'") else holder
    name = names.get(inner, "")
    return f"{inner or holder or 'a lease'} ({name})" if name else inner or holder or "a lease"
