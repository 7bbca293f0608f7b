"""Whole collections read in order, again and again: the worst case of least recently used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from ...trace import TraceRequest
from .draws import SharedTexts, arrivals, extend_prefix, lengths, streams
from .generator import LONGEST_PROMPT, Generator, option


@dataclass(kw_only=True)
class Scan(Generator):
    """Scans: request i is document i % documents and a unique question.

    LRU never hits if the cache is smaller than the collection.

    Args:
        documents: number of documents in the collection.
        document_tokens: median length of a document (lognormal).
        question_tokens: median length of a question (lognormal).
        output_tokens: median length of an answer (lognormal).
        spread: deviation of the logarithm of these lengths.
    """

    documents: int = option(200, 1, 10**7)
    document_tokens: int = option(2000, 1, LONGEST_PROMPT)
    question_tokens: int = option(40, 1, LONGEST_PROMPT)
    output_tokens: int = option(100, 1, LONGEST_PROMPT)
    spread: float = option(0.5, 0.0, 5.0)

    def endless(self) -> Iterator[TraceRequest]:
        lengths_of, when, inputs, outputs = streams(self.seed, 4)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        texts = SharedTexts(
            lengths_of, self.documents, self.document_tokens, self.spread, max(longest // 2, 1), block_size
        )
        questions = lengths(inputs, self.question_tokens, self.spread, longest)
        answers = lengths(outputs, self.output_tokens, self.spread, longest)
        next_id = texts.num_ids
        for (arrival, _), number in zip(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds), count(), strict=False
        ):
            prefix = texts.ids(number % self.documents)
            num_tokens = min(texts.tokens[number % self.documents] + next(questions), longest)
            ids = extend_prefix(prefix, num_tokens, block_size, next_id)
            next_id += len(ids) - len(prefix)
            yield TraceRequest(arrival, num_tokens, next(answers), ids)
