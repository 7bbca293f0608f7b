"""This module has what a cost is asked: one request, and the replicas that may take it, as arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(slots=True)
class Ask:
    """This is a request as routers see it.

    num_tokens: of the prompt. max_tokens: of the answer, at most. session: a conversation's name, "" if unknown.
    links: one key for each `link_tokens` leading tokens, equal where all tokens up to there are equal. now: seconds on
    the caller's clock. tenant: whose it is, by number, where tenants share the pools (`Shares`); -1 where they do not.
    """

    name: str
    num_tokens: int
    max_tokens: int = 0
    session: str = ""
    links: Sequence[Hashable] = ()
    link_tokens: int = 1
    now: float = 0.0
    tenant: int = -1


@dataclass(slots=True)
class Candidates:
    """These are the replicas that may take a request. All arrays have an item a replica and are this object's own.

    is_believed: whether what a replica says it has may be counted; where not, its hits are 0. hits, gpu_hits: leading
    prompt tokens that it has anywhere, and on its GPU. coming: those that requests in flight there share with this one.
    waiting, uncached: requests before their first token, and prompt tokens that they have to compute. requests, held:
    all in flight, and the tokens of their prompts and answers at most. work: prompt tokens computed of late, a decayed
    sum. seconds_a_token: measured for a prompt token.
    """

    names: list[str]
    is_believed: Bools
    hits: Ints
    gpu_hits: Ints
    coming: Ints
    waiting: Ints
    uncached: Ints
    requests: Ints
    held: Ints
    work: Floats
    seconds_a_token: Floats


class Cost(Protocol):
    """A cost is a way to choose: the least one is taken, of equals that of the replica with the fewest requests.

    `sent` and `gone` keep what a way remembers by itself, as those must that follow no events.
    """

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return float64 (candidates,), finite or inf; the arguments stay as they are."""
        ...

    def sent(self, ask: Ask, replica: str) -> None:
        """Take note that a request went to a replica."""
        ...

    def gone(self, replica: str) -> None:
        """Forget a replica."""
        ...


class PlainCost:
    """This is a cost that remembers nothing."""

    def sent(self, ask: Ask, replica: str) -> None:
        """Nothing is remembered."""

    def gone(self, replica: str) -> None:
        """Nothing is there to forget."""
