"""What is asked of every engine, in the same words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from .work import Work


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens of each request, in the order of the prompts, and the seconds from the call to the last of them."""

    token_ids: list[list[int]]
    seconds: float


class Contestant(ABC):
    """An engine that holds the model already."""

    name: str
    version: str

    @abstractmethod
    def answer(self, work: Work) -> Answer:
        """Do one round's work."""

    def close(self) -> None:  # noqa: B027  # most have nothing to release
        """End what it started."""
