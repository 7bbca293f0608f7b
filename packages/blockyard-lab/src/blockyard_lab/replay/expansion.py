"""Turns a request of a trace into tokens that the manager can hash."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import TraceError

from ..trace import Trace, TraceRequest

#: Prompt tokens are below, output tokens are not, so that no prompt hits an output.
FIRST_OUTPUT_TOKEN = 2**30


class Expansion:
    """Makes the tokens of one trace's requests, in order.

    A hash id becomes `hash_block_size` tokens: the id itself, in two tokens of 30 bits, then counting up. So two blocks
    are equal exactly if their ids are. In a trace with one token per block, the token is the id. Token ids are used
    unchanged. A prompt with only a length matches no other. Outputs match no prompt and no other output.
    """

    def __init__(self, trace: Trace) -> None:
        self._name = trace.name
        self._size = trace.hash_block_size
        self._ramp = np.arange(max(self._size, 1), dtype=np.int32)
        self._num_requests = 0

    def prompt(self, request: TraceRequest) -> NDArray[np.int32]:
        """Return the prompt's tokens, (num_prompt_tokens,) int32. Call it once per request."""
        self._num_requests += 1
        if request.token_ids is not None:
            return request.token_ids
        if request.hash_ids is None:
            tokens = np.full(request.num_prompt_tokens, self._num_requests // FIRST_OUTPUT_TOKEN, np.int32)
            tokens[0] = self._num_requests % FIRST_OUTPUT_TOKEN
            return tokens
        return self._expand(request.hash_ids)[: request.num_prompt_tokens]

    def output(self, request: TraceRequest) -> NDArray[np.int32]:
        """Return the output of the latest prompt, (max(num_output_tokens, 1),) int32."""
        number = self._num_requests % FIRST_OUTPUT_TOKEN
        return np.full(max(request.num_output_tokens, 1), FIRST_OUTPUT_TOKEN + number, np.int32)

    def _expand(self, hash_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        if self._size == 1:
            if hash_ids.max(initial=0) >= FIRST_OUTPUT_TOKEN:
                raise TraceError(
                    f"{self._name} has hash id {int(hash_ids.max())}; with one token per block, ids must be below "
                    f"{FIRST_OUTPUT_TOKEN}"
                )
            return hash_ids.astype(np.int32)
        tokens = np.empty((len(hash_ids), self._size), np.int32)
        tokens[:] = self._ramp
        tokens[:, 0] = hash_ids % FIRST_OUTPUT_TOKEN
        tokens[:, 1] = hash_ids // FIRST_OUTPUT_TOKEN
        return tokens.reshape(-1)
