"""A job on its way to a replica, as Ray carries it. The router reads it first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard.keys import ExtraKey
from blockyard.routing import Choice
from blockyard_engine import SamplingParams

#: Called with the router's number of the request and the choice.
OnChoice = Callable[[str, Choice], None]


@dataclass(slots=True)
class ReplicaRequest:
    """One prompt for a replica, with the tokens of its answer that the client already has.

    Attributes:
        token_ids: (n,) int32, the prompt and the answer so far.
        num_prompt: number of prompt tokens.
        max_tokens: maximum of tokens still to come, over all completions.
        sampling: how tokens are chosen.
        priority: lower values run first.
        extra_keys: extra keys of its blocks.
        session: the engine's name of the session.
        name: id of the client's request, for the log.
        trace: trace headers of the client's span.
        hands_over: whether to stop after the first tokens, once the tiers have stored the prompt.
        avoid: replicas to use only if there is no other.
        on_choice: called in the router's thread with the request's number and the choice. Stays in this process.
        on_reassigned: called in the router's thread if another replica took it. Stays in this process.
    """

    token_ids: NDArray[np.int32]
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    extra_keys: tuple[ExtraKey, ...] = ()
    session: str | None = None
    name: str = ""
    trace: dict[str, str] = field(default_factory=dict)
    hands_over: bool = False
    avoid: Sequence[str] = ()
    on_choice: OnChoice | None = field(default=None, compare=False)
    on_reassigned: Callable[[str], None] | None = field(default=None, compare=False)

    def __reduce__(self) -> Any:
        plain = replace(self, avoid=(), on_choice=None, on_reassigned=None)
        return ReplicaRequest, tuple(getattr(plain, name) for name in _CARRIED)

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt."""
        tokens: list[int] = self.token_ids[: self.num_prompt].tolist()
        return tokens

    @property
    def answer_prefix(self) -> list[int]:
        """Tokens of the answer that the client already has."""
        tokens: list[int] = self.token_ids[self.num_prompt :].tolist()
        return tokens


_CARRIED = (
    "token_ids",
    "num_prompt",
    "max_tokens",
    "sampling",
    "priority",
    "extra_keys",
    "session",
    "name",
    "trace",
    "hands_over",
)
