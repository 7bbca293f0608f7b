"""Bounds on the turns per hour of a closed loop that no schedule passes."""

from __future__ import annotations

import numpy as np

from ..replay.timed import ServiceModel
from .turns import SessionLoad, Turn

#: Prices of the whole pool for a second, in seconds of compute.
_PRICES = np.geomspace(1e-3, 1e3, 100)


def closed_bounds(
    load: SessionLoad, device: ServiceModel, num_tokens: int, num_sessions: int, most_tokens: float
) -> tuple[float, float]:
    """Return bounds on turns per hour: for schedules that know each pause, and for those that know only ages.

    A context is either held during the pause (memory: its tokens times the seconds) or computed again (compute). It
    also takes memory while it is computed, half of it on average, and while it decodes. A device has one second of
    compute and `num_tokens` of memory per second. So at any price of memory, turns per second are at most (1 + price *
    num_tokens) / (the mean turn's compute + price * memory), and the cheapest price gives the bound. A rule by age
    holds every context for the same time. Blocks that sessions share count as cached and take no memory. O(turns log
    turns).

    Args:
        load: the sessions.
        device: step times.
        num_tokens: tokens of the pool.
        num_sessions: sessions at once.
        most_tokens: turns with more tokens are left out.
    """
    turns = [turn for session in load.sessions for turn in session if turn.num_tokens <= most_tokens]
    turns.sort(key=lambda turn: turn.pause if turn.num_kept > turn.num_shared else np.inf)
    size = load.block_size
    returns = np.array([turn.num_kept > turn.num_shared for turn in turns])
    pause = np.where(returns, [turn.pause for turn in turns], np.inf)
    memory = np.array([turn.num_prompt - turn.num_shared * size for turn in turns], np.float64)
    decode = np.array([turn.num_output * device.seconds_per_step for turn in turns])
    warm = np.array([warm_seconds(turn, device, size) for turn in turns])
    cold = np.array([device.prompt_seconds(turn.num_shared * size, turn.num_prompt) for turn in turns])
    known = aged = np.inf
    for price in (_PRICES / num_tokens).tolist():
        held = np.where(returns, warm + price * memory * (np.where(returns, pause, 0) + warm / 2 + decode), np.inf)
        computed = cold + price * memory * (cold / 2 + decode)
        supply = (1 + price * num_tokens) * len(turns)
        known = min(known, supply / np.minimum(held, computed).sum())
        # The turns are in order of their pauses, so the first ones are held until each age.
        num_returns = int(returns.sum())
        ages = np.append(0.0, pause[:num_returns])
        before = np.append(0.0, np.cumsum(held[:num_returns]))
        after = computed.sum() - np.append(0.0, np.cumsum(computed[:num_returns]))
        dropped = memory[:num_returns].sum() - np.append(0.0, np.cumsum(memory[:num_returns]))
        aged = min(aged, supply / (before + after + price * ages * dropped).min())
    alone = sum(alone_seconds(turn, device, size) for turn in turns) / len(turns)
    return 3600 * float(min(known, num_sessions / alone)), 3600 * float(min(aged, num_sessions / alone))


def warm_seconds(turn: Turn, device: ServiceModel, block_size: int) -> float:
    """Return the time to compute a turn's prompt in an unlimited cache."""
    return device.prompt_seconds(max(turn.num_kept, turn.num_shared) * block_size, turn.num_prompt)


def alone_seconds(turn: Turn, device: ServiceModel, block_size: int) -> float:
    """Return a turn's pause, and its time on an idle device with an unlimited cache, at the least time per token."""
    return turn.pause + warm_seconds(turn, device, block_size) + turn.num_output * device.seconds_per_step
