"""Hints of callers about the states of one prompt, for caches of hybrid models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .argument_types import Integer, Integers


@dataclass(frozen=True, slots=True)
class StateHints:
    """Which states of a prompt to checkpoint, and whether one comes from outside (`KVCacheManager.allocate`).

    Only for a cache with states. `allocate` checks the values, because their limits depend on the prompt.

    Args:
        checkpoints: lengths of prefixes that other prompts will share, such as the end of a system prompt: integers
            (n,) from 1 to the length of the prompt, at most 4,096. A state is checkpointed at each of them, rounded
            down to a checkpoint position.
        waiting_prompts: up to 64 prompts that wait to be admitted. A state is checkpointed where the prompt diverges
            from each of them, rounded down to a checkpoint position.
        external_state_tokens: length of the prefix whose state the caller will supply, from a tier or a hand-over; 0
            for none. Unless a state at that position or past it is cached, the hit covers all cached keys and values
            before it. No state is then checkpointed before it, and `reserve` raises `InvalidArgument` until it is
            asked for all tokens up to that position.

    >>> from blockyard import StateHints
    >>> StateHints(checkpoints=[1600]).external_state_tokens
    0
    """

    checkpoints: Integers = ()
    waiting_prompts: Sequence[Integers] = ()
    external_state_tokens: Integer = 0
