"""A cache of states, keys and values in one budget: the loop that results about states run."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import require_int
from ...cache_options import require_checkpoint_rules
from ..policies.states.checkpoint import MOST_SESSIONS, SHARED
from ..policies.states.checkpoint_rules import CheckpointRules
from ..policies.states.orders import make_order
from ..policies.states.registry import CheckpointRegistry
from ..policies.states.request_record import RequestRecord


class _Leaving:
    """A request whose results are pending."""

    def __init__(self, request: RequestRecord, positions: list[int], kinds: list[int], session: i64) -> None:
        self.request = request
        self.session = session
        self.positions = positions
        self.kinds = kinds


class StateRun:
    """Runs requests, one after another or `in_flight` at a time, through a cache of states, keys and values.

    A request hits only what requests that have ended computed. Sizes are in tokens of keys and values.

    Args:
        order: name of the eviction order (docs/states.md).
        places: names of the checkpoint rules (docs/states.md).
        state_tokens: size of a state.
        budget: size of everything that is cached between requests.
        block_size: tokens per block.
        memory: hashes are remembered of this many budgets of tokens.
        in_flight: requests that run at a time.

    Raises:
        InvalidArgument: a name is unknown.
    """

    def __init__(
        self,
        order: str,
        places: tuple[str, ...],
        state_tokens: int,
        budget: int,
        block_size: int = 16,
        memory: int = 4,
        in_flight: int = 1,
    ) -> None:
        require_checkpoint_rules("places", places)
        remembered = memory * budget // block_size
        self.registry = CheckpointRegistry(make_order(order, state_tokens), block_size, remembered)
        self.rules = CheckpointRules(places, block_size)
        self.budget: i64 = budget
        self.block_size: i64 = block_size
        self.in_flight: i64 = in_flight
        self.num_written: i64 = 0
        self._running: list[_Leaving] = []
        self._over: set[int] = set()

    def request(
        self,
        keys: npt.NDArray[np.int64],
        num_prompt: int,
        num_total: int,
        requested: list[int],
        waiting: list[int],
        session: int = 0,
    ) -> int:
        """Run a request; return the number of tokens that it hits.

        Args:
            keys: keys of its blocks, those of its output included.
            num_prompt: tokens of the prompt.
            num_total: tokens of prompt and output.
            requested: positions that the application names, in tokens.
            waiting: branch points with waiting prompts, in tokens.
            session: number of its session, up to 2**62; 0 for none.

        Raises:
            InvalidArgument: `session` is outside its limits.
        """
        session = require_int("session", session, 0, MOST_SESSIONS)
        last = i64(max(num_prompt - 1, 0)) // self.block_size * self.block_size
        total = i64(num_total) // self.block_size * self.block_size
        request = self.registry.begin_request(vec[i64](keys), i64(len(keys)), last)
        if session in self._over:
            self._over.remove(session)
            self.registry.set_session_over(session, False)
        self.rules.choose(request.hit, request.known, last, total, requested, waiting)
        self._running.append(_Leaving(request, self.rules.positions, self.rules.kinds, session or SHARED))
        while len(self._running) >= self.in_flight:
            self._end(self._running.pop(0))
        return int(request.hit)

    def over(self, session: int) -> None:
        """Hint that a session does not come back (docs/hints.md). O(states).

        States that only it used are evicted sooner. `session` is from 1 to 2**62. Raises `InvalidArgument` for others.
        """
        number = require_int("session", session, 1, MOST_SESSIONS)
        self._over.add(number)
        self.registry.set_session_over(number, True)

    def _end(self, leaving: _Leaving) -> None:
        """Checkpoint the requested states, longest prefix first, and then evict down to the budget."""
        order = sorted(range(len(leaving.positions)), key=leaving.positions.__getitem__, reverse=True)
        made: list[int] = []
        for place in order:
            number = self.registry.add(leaving.request, leaving.positions[place], leaving.kinds[place])
            if number > 0:
                made.append(int(number))
        self.registry.end_request(leaving.request, made, leaving.session, int(leaving.session) in self._over)
        while self.registry.num_held > self.budget:
            self.registry.drop(self.registry.next_to_drop())
        for number in made:
            self.num_written += 1 if self.registry.get(number).is_cached else 0
