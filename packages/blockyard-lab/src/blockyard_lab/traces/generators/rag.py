"""Retrieval: instructions, a few documents in the order they were found, and a question.

A document's keys and values depend on the documents before it, so a block id must identify those and their order. The
id is computed without a table: the documents up to the block's last token are the digits of a number in base documents
+ 1, and the block's position in the prompt is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgument

from ...trace import TraceRequest
from ..line_fields import read_only
from .draws import arrivals, lengths, lognormal, streams, zipf
from .generator import ID_BITS, LONGEST_PROMPT, Generator, option


@dataclass(kw_only=True)
class Rag(Generator):
    """Retrieval-augmented generation: shared instructions, documents in varying order, and a unique question.

    Only requests that start with the same documents in the same order share their blocks. (documents + 1)**retrieved *
    blocks of the longest prompt must stay below 2**55.

    Args:
        documents: number of documents in the collection.
        retrieved: number of different documents in a prompt.
        zipf: exponent of Zipf's law for the documents' popularity.
        instruction_tokens: exact length of the instructions.
        document_tokens: median length of a document (lognormal).
        question_tokens: median length of a question (lognormal).
        output_tokens: median length of an answer (lognormal).
        spread: deviation of the logarithm of these lengths.
    """

    documents: int = option(1000, 1, 10**6)
    retrieved: int = option(3, 1, 16)
    zipf: float = option(1.0, 0.0, 10.0)
    instruction_tokens: int = option(200, 0, LONGEST_PROMPT)
    document_tokens: int = option(500, 1, LONGEST_PROMPT)
    question_tokens: int = option(40, 1, LONGEST_PROMPT)
    output_tokens: int = option(200, 1, LONGEST_PROMPT)
    spread: float = option(0.5, 0.0, 5.0)

    def check_together(self) -> None:
        paths = (self.documents + 1) ** self.retrieved * self._most_blocks()
        if paths >= 2 ** (ID_BITS - 1):
            raise InvalidArgument(
                f"documents is {self.documents} and retrieved {self.retrieved}; (documents + 1)**retrieved times "
                f"the {self._most_blocks()} blocks of the longest prompt must be below 2**{ID_BITS - 1}"
            )
        if self.retrieved > self.documents:
            raise InvalidArgument(f"retrieved is {self.retrieved}; there are only {self.documents} documents")
        if self.instruction_tokens >= self.max_prompt_tokens:
            raise InvalidArgument(
                f"instruction_tokens is {self.instruction_tokens}; it must be below max_prompt_tokens, "
                f"{self.max_prompt_tokens}"
            )

    def _most_blocks(self) -> int:
        return self.max_prompt_tokens // self.hash_block_size + 1

    def endless(self) -> Iterator[TraceRequest]:
        texts, when, which, inputs, outputs = streams(self.seed, 5)
        longest = self.max_prompt_tokens
        tokens = lognormal(texts, self.document_tokens, self.spread, longest, self.documents).tolist()
        popular = zipf(which, self.documents, self.zipf)
        questions = lengths(inputs, self.question_tokens, self.spread, longest)
        answers = lengths(outputs, self.output_tokens, self.spread, longest)
        next_id = 2 ** (ID_BITS - 1)
        for arrival, _ in arrivals(when, self.rate, self.on_seconds, self.off_seconds):
            found = _different(popular, self.retrieved, self.documents)
            parts, end, num_full = self._shared(found, tokens)
            num_tokens = min(end + next(questions), longest)
            missing = -(-num_tokens // self.hash_block_size) - num_full
            parts.append(np.arange(next_id, next_id + missing))
            next_id += missing
            yield TraceRequest(arrival, num_tokens, next(answers), read_only(np.concatenate(parts)))

    def _shared(self, found: list[int], tokens: list[int]) -> tuple[list[NDArray[np.int64]], int, int]:
        """Return the ids before the question (as a list of arrays), the tokens there, and the full blocks.

        Stops before a document that would leave no token for the question.
        """
        path, end = 0, self.instruction_tokens
        num_full = end // self.hash_block_size
        parts = [np.arange(num_full)]
        for document in found:
            if end + tokens[document] >= self.max_prompt_tokens:
                break
            end += tokens[document]
            path = path * (self.documents + 1) + document + 1
            base, after = path * self._most_blocks(), end // self.hash_block_size
            parts.append(np.arange(base + num_full, base + after))
            num_full = after
        return parts, end, num_full


def _different(popular: Iterator[int], count: int, documents: int) -> list[int]:
    """Return `count` different draws in drawn order. After many tries, the most popular of the rest are added."""
    found: dict[int, None] = {}
    for _ in range(20 * count):
        found[next(popular)] = None
        if len(found) == count:
            return list(found)
    for document in range(documents):
        if len(found) == count:
            break
        found.setdefault(document)
    return list(found)
