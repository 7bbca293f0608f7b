"""What every block manager is asked for, in the same words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt


class Peer(ABC):
    """One block manager with blocks of 16 tokens, driven through its own interface.

    `prompt` turns tokens into what an engine on this peer would hold already, and `request` makes what it makes of
    each request once; what a row counts begins after these, unless the row says otherwise.
    """

    name: ClassVar[str]
    #: What `look_up` is given: "a buffer" or "a list".
    prompt_form: ClassVar[str]

    @abstractmethod
    def version(self) -> str:
        """The release that is measured."""

    @abstractmethod
    def open(self, num_blocks: int, order: npt.NDArray[np.int32] | None) -> None:
        """Make a new pool, whose free blocks are used in this order, or as they lie; the old one is gone."""

    @abstractmethod
    def prompt(self, tokens: np.ndarray) -> Any:
        """The tokens in the form that the peer takes; not counted."""

    @abstractmethod
    def look_up(self, prompt: Any) -> int:
        """How many tokens of the prompt are cached, with all hashing and key building that this takes."""

    @abstractmethod
    def hold_and_release(self, prompt: Any) -> int:
        """Look up, hold every hit block, give all of them back; returns the tokens hit."""

    @abstractmethod
    def request(self, prompt: Any) -> Any:
        """What the peer makes of a new request once, hashes included; not counted where blocks are allocated."""

    @abstractmethod
    def admit(self, request: Any) -> Any:
        """Allocate blocks for a prompt of which nothing is cached, and publish them; returns what `free` takes."""

    @abstractmethod
    def free(self, holding: Any) -> None:
        """Give the blocks back; they stay cached until something else needs them."""

    @abstractmethod
    def open_batch(self, prompts: list[Any]) -> None:
        """Admit a batch that decodes together."""

    @abstractmethod
    def decode_step(self, sampled: list[int]) -> None:
        """One more token for every sequence of the batch."""

    @abstractmethod
    def serve(self, prompt: Any, output: Any) -> int:
        """A whole request: lookup, blocks for prompt and output, publishing, free. Returns the tokens hit."""
