"""An ask is a job on its way to a replica, as Ray carries it; the router reads it before it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard.keys import ExtraKey
from blockyard.routing import Choice
from blockyard_engine import SamplingParams

#: Told the number of the request, by which the router's book knows it, and the choice.
Told = Callable[[str, Choice], None]


@dataclass(slots=True)
class ReplicaAsk:
    """This is one prompt for a replica, with the tokens of its answer that the client has already.

    token_ids: (n,) int32, prompt and given together: what a replica may have. num_prompt: how many are the prompt's.
    max_tokens: those that may still come, of all completions. trace: the headers by which a caller's span is known.
    hands_over: the answer is to end behind its first tokens, when the tiers have the prompt. avoid: replicas that are
    not to have it, if there are others. on_choice, on_moved: told in the router's thread where
    it goes; they stay in this process.
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
    on_choice: Told | None = field(default=None, compare=False)
    on_moved: Callable[[str], None] | None = field(default=None, compare=False)

    def __reduce__(self) -> Any:
        plain = replace(self, avoid=(), on_choice=None, on_moved=None)
        return ReplicaAsk, tuple(getattr(plain, name) for name in _CARRIED)

    @property
    def prompt(self) -> list[int]:
        """Return the prompt's tokens."""
        tokens: list[int] = self.token_ids[: self.num_prompt].tolist()
        return tokens

    @property
    def given(self) -> list[int]:
        """Return the answer's tokens that are there already."""
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
