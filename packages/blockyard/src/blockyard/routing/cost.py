"""Interface of a routing cost: a request, and the candidate replicas as arrays."""

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
class RouteRequest:
    """A request to be routed.

    Attributes:
        name: id of the request.
        num_tokens: tokens of the prompt.
        max_tokens: most tokens of the answer.
        session: name of the conversation, "" if unknown.
        links: a key for each `link_tokens` leading tokens; equal if all tokens up to there are equal.
        link_tokens: tokens per link.
        now: seconds on the caller's clock.
        tenant: number of its tenant if tenants share the pools (`Shares`), else -1.
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
    """The replicas that may take a request. Each array has one item per replica and may be modified.

    Attributes:
        names: names of the replicas.
        is_believed: whether a replica's events are complete and recent; its hits are 0 otherwise.
        hits: leading prompt tokens that it holds anywhere.
        gpu_hits: leading prompt tokens that it holds on its GPU.
        coming: leading prompt tokens that requests in flight there share with this one.
        waiting: requests before their first token.
        uncached: prompt tokens that they still have to compute.
        requests: all requests in flight.
        held: tokens of their prompts and longest answers.
        work: prompt tokens assigned recently, a decayed sum.
        seconds_a_token: measured time per prompt token.
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
    """A cost function: the replica with the lowest cost is chosen, and of equals the one with the fewest requests.

    `record` and `forget` serve costs that keep their own history instead of following events.
    """

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        """Return the costs, float64 (candidates,), finite or inf. Must not modify the arguments."""
        ...

    def record(self, request: RouteRequest, replica: str) -> None:
        """Record that a request was sent to a replica."""
        ...

    def forget(self, replica: str) -> None:
        """Forget a removed replica."""
        ...


class StatelessCost:
    """Base of costs without a history."""

    def record(self, request: RouteRequest, replica: str) -> None: ...

    def forget(self, replica: str) -> None: ...
