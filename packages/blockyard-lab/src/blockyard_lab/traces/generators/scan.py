"""Whole collections read in order, again and again: what least-recently-used is worst at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from ...trace import TraceRequest
from .draws import SharedTexts, arrivals, continued, lengths, streams
from .options import LONGEST_PROMPT, Generator, option


@dataclass(kw_only=True)
class Scan(Generator):
    """Scans: request number i is document i % documents and a question that comes once.

    A cache smaller than the collection, evicting what is idle longest, never hits. documents: in the collection.
    document_tokens, question_tokens, output_tokens: medians of lognormal lengths; spread: their deviation, of the
    logarithm.
    """

    documents: int = option(200, 1, 10**7)
    document_tokens: int = option(2000, 1, LONGEST_PROMPT)
    question_tokens: int = option(40, 1, LONGEST_PROMPT)
    output_tokens: int = option(100, 1, LONGEST_PROMPT)
    spread: float = option(0.5, 0.0, 5.0)

    def endless(self) -> Iterator[TraceRequest]:
        """Yield the requests, without end. Memory: 16 bytes a document."""
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
            ids = continued(prefix, num_tokens, block_size, next_id)
            next_id += len(ids) - len(prefix)
            yield TraceRequest(arrival, num_tokens, next(answers), ids)
