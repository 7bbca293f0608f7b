"""From a request of a trace to tokens that the manager can hash."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import TraceError

from ..trace import Trace, TraceRequest

#: Prompt tokens stay below it and output tokens do not, so that no prompt ever hits an output.
FIRST_OUTPUT_TOKEN = 2**30


class Expansion:
    """Tokens for the requests of one trace, in order.

    Where the trace names blocks, each id stands for `hash_block_size` tokens that begin with the id itself, in two
    tokens of 30 bits, and count on from there: two blocks are equal exactly if their ids are. With one token a block
    the id is the token. Where the trace has tokens, they are taken as they are. Where it has lengths alone, every
    prompt is like no other. Output tokens match no prompt and no other output.
    """

    def __init__(self, trace: Trace) -> None:
        self._name = trace.name
        self._size = trace.hash_block_size
        self._ramp = np.arange(max(self._size, 1), dtype=np.int32)
        self._num_requests = 0

    def prompt(self, request: TraceRequest) -> NDArray[np.int32]:
        """Return the prompt's tokens, (num_prompt_tokens,) int32. Call once a request."""
        self._num_requests += 1
        if request.token_ids is not None:
            return request.token_ids
        if request.hash_ids is None:
            return self._unlike_any(request.num_prompt_tokens)
        return self._named(request.hash_ids)[: request.num_prompt_tokens]

    def output(self, request: TraceRequest) -> NDArray[np.int32]:
        """Return the tokens generated after the latest prompt, (max(num_output_tokens, 1),) int32."""
        number = self._num_requests % FIRST_OUTPUT_TOKEN
        return np.full(max(request.num_output_tokens, 1), FIRST_OUTPUT_TOKEN + number, np.int32)

    def _named(self, hash_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        if self._size == 1:
            return self._one_token_ids(hash_ids)
        tokens = np.empty((len(hash_ids), self._size), np.int32)
        tokens[:] = self._ramp
        tokens[:, 0] = hash_ids % FIRST_OUTPUT_TOKEN
        tokens[:, 1] = hash_ids // FIRST_OUTPUT_TOKEN
        return tokens.reshape(-1)

    def _one_token_ids(self, hash_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        if hash_ids.max(initial=0) >= FIRST_OUTPUT_TOKEN:
            raise TraceError(
                f"{self._name} has the id {int(hash_ids.max())} for a block of one token; it must be below "
                f"{FIRST_OUTPUT_TOKEN}"
            )
        return hash_ids.astype(np.int32)

    def _unlike_any(self, length: int) -> NDArray[np.int32]:
        tokens = np.full(length, self._num_requests // FIRST_OUTPUT_TOKEN, np.int32)
        tokens[0] = self._num_requests % FIRST_OUTPUT_TOKEN
        return tokens
