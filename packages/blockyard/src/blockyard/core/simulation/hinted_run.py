"""A policy run with hints about sessions after each request."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..arrays import zeros_i64
from ..gate import Interruption
from ..policies.base import EvictionPolicy
from ..policies.layers.hinted import follow_sessions
from ..policies.sessions import SLOT_SPAN, Sessions
from ..policies.stack import EvictionStack
from .policy_run import PolicyRun


class HintedRun(PolicyRun):
    """A `PolicyRun` whose requests are turns of sessions, with hints that reach the policy as in a pool.

    Hints take precedence over the policy's order. A new turn of a session cancels its hint. Up to 2**20 sessions are
    known; then the oldest is forgotten for each new one. A policy that takes no hints runs without them. Sessions are
    numbers from 0 to num_sessions - 1.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: i64, num_contents: i64, longest_request: i64, num_sessions: i64
    ) -> None:
        super().__init__(policy, capacity, num_contents, longest_request)
        num_blocks = int(capacity + longest_request + 1)
        self._sessions = Sessions(num_blocks, int(min(max(num_sessions, 1), SLOT_SPAN)))
        #: It is told of sessions; of blocks its top layer is, and asked, without what a pool needs in between.
        self._stack = EvictionStack(policy, num_blocks, Interruption())
        follow_sessions(self._stack, self._sessions)
        self._policy = self._stack.top
        #: 1 + the slot of each session; 0 for one that is not known. And the session in each slot.
        self._slot_of = zeros_i64(int(num_sessions))
        self._session_in = zeros_i64(int(self._sessions.max_sessions))
        #: The tag of the request that runs.
        self._tag: i64 = 0

    def run_turns(
        self,
        ids_array: npt.NDArray[np.int64],
        starts_array: npt.NDArray[np.int64],
        sessions_array: npt.NDArray[np.int64],
        is_over_array: npt.NDArray[np.int64],
    ) -> None:
        """Run all requests. After each, hint that its session is over if its item in `is_over` is 1.

        All arguments are contiguous int64 arrays: ids and starts as in `run`, sessions and is_over with one item per
        request.
        """
        ids, starts = vec[i64](ids_array), vec[i64](starts_array)
        sessions, is_over = vec[i64](sessions_array), vec[i64](is_over_array)
        for request in range(i64(len(starts)) - 1):
            slot = self._begin(sessions[request])
            self._request(ids, starts[request], starts[request + 1])
            if is_over[request] != 0:
                self._stack.set_over(slot, True)

    def _begin(self, session: i64) -> i64:
        """Begin a turn of a session; return its slot."""
        slot = self._slot_of[session] - 1
        if slot < 0:
            slot = self._open(session)
        self._tag = self._stack.begin_sequence(slot)
        return slot

    def _open(self, session: i64) -> i64:
        if not self._stack.make_session_room():
            oldest = self._sessions.oldest()
            self._stack.forget_session(oldest)
            self._slot_of[self._session_in[oldest]] = 0
        slot = self._sessions.open()
        self._slot_of[session] = slot + 1
        self._session_in[slot] = session
        return slot

    def _release(self, ids: vec[i64], start: i64, stop: i64) -> None:
        """Insert the request's blocks into the policy, tagged with the session if only it has used them."""
        for place in range(start, stop):
            self._sessions.mark(self._slot[ids[place]], self._tag)
        super()._release(ids, start, stop)

    def _evict(self) -> i64:
        if self._stack.failure:
            raise self._stack.error()
        slot = super()._evict()
        self._sessions.forget_block(slot)
        return slot

    def check(self) -> None:
        """Raise `InvariantError` unless sessions and hints are consistent. O(slots + sessions)."""
        self._sessions.check()
        self._policy.check()
