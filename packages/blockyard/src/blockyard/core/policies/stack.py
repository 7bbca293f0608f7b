"""What a pool asks for victims: an eviction policy with its layers; errors are caught, and answers checked."""

from operator import index as index_of
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError, PolicyError
from ..arrays import clear_i64, grown_i64, zeros_i64
from ..gate import Interruption
from .base import EvictionPolicy, Layer
from .layers.hinted import Hinted
from .layers.retention import Retention, RetentionWatch
from .layers.sessions import Sessions
from .layers.shares import Shares, TenantBook
from .states.layer import StateLayer

NONE: Final[i64] = 0


class EvictionStack:
    """Layers stand around an eviction policy, from outside: retention, tenants' shares, states, hints about
    sessions.

    Each layer stands around the next one and has its interface: what the stack tells `top`, each layer takes note of
    and passes on, and what the stack asks of it, each may decide or ask the next one.

    The stack catches what the policy raises, so that the pool's change is finished. An ordinary exception in a callback
    marks the policy as failed: the next question raises `PolicyError`. A KeyboardInterrupt, SystemExit or the like
    marks it too, because it may have missed what it was told, and goes to `interruption`: the call that runs is
    finished or undone, and then it is raised. What `evict` raises fails the call that asked, before it changed
    anything. Every answer is checked: a policy that names a block which is not idle fails that call too, not the pool.
    Put another policy in its place, and all goes on.

    retains: told how retentions end; None where blocks cannot be
    retained. sessions: who uses which blocks, where that is known; the policy may refuse hints about them.
    tenants: who share the pool, if any do.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        num_blocks: int,
        interruption: Interruption,
        retains: RetentionWatch | None = None,
        sessions: Sessions | None = None,
        tenants: TenantBook | None = None,
    ) -> None:
        self.interruption = interruption
        self.top = policy
        self.layers: list[Layer] = []
        names: list[str] = []
        layer = policy.as_layer()
        while layer is not None:
            self.layers.append(layer)
            names.append(f"{type(layer).__name__} around ")
            policy = layer.policy
            layer = policy.as_layer()
        self.name = "".join(names) + type(policy).__name__
        #: Around all but retention, where states are judged as such.
        self.states: StateLayer | None = None
        if self.layers and isinstance(self.layers[0], StateLayer):
            self.states = self.layers[0]
        #: What the policy raised first when it was told something; "" while it has not.
        self.failure = ""
        #: 1 + the depth of each idle block, as the policy was told; 0 for the others, below 0 for those just chosen.
        self._idle = zeros_i64(num_blocks)
        #: How many blocks the policy can name.
        self.num_idle: i64 = 0
        #: None are known until `know`.
        self.sessions = Sessions(0, 0)
        self.hints: Hinted | None = None
        self.retention: Retention | None = None
        self.shares: Shares | None = None
        if sessions is not None:
            sessions.make_block_room(num_blocks)
            self.know(sessions)
        if tenants is not None:
            self.shares = Shares(self.top, num_blocks, tenants)
            self.layers.insert(0, self.shares)
            self.top = self.shares
        if retains is not None:
            self.retention = Retention(self.top, num_blocks, retains, self.shares)
            self.layers.insert(0, self.retention)
            self.top = self.retention
        #: Whether it wants to be told of hits.
        self.needs_hits = self._asks("needs_hits")

    def _asks(self, method: str) -> bool:
        """What the policy says of itself. Raises `PolicyError`."""
        try:
            return self.top.needs_hits() if method == "needs_hits" else self.top.takes_hints()
        except Exception as error:
            raise self._refused(method, error)

    def _refused(self, method: str, error: Exception) -> PolicyError:
        text = text_of(error, self.interruption)
        return PolicyError(f"eviction policy {self.name}: {method} raised {type(error).__name__}: {text}")

    def know(self, sessions: Sessions) -> None:
        """Sessions are known from now on; put hints around the policy, inside of all layers, if it takes any.

        O(num_blocks). Raises `PolicyError`, or MemoryError; nothing has changed then.
        """
        if self._asks("takes_hints"):
            inside = self.layers[-1].policy if self.layers else self.top
            hints = self._hints_around(inside, sessions)
            if self.layers:
                self.layers[-1].policy = hints
            else:
                self.top = hints
            self.layers.append(hints)
            self.hints = hints
            if self.shares is not None:
                self.shares.is_direct = False
        self.sessions = sessions

    def _hints_around(self, policy: EvictionPolicy, sessions: Sessions) -> Hinted:
        idle = [block for block in range(len(self._idle)) if self._idle[i64(block)] != 0]
        for layer in self.layers:
            idle = [block for block in idle if layer.passes(i64(block))]
        return Hinted(policy, len(self._idle), sessions, idle)

    # What happens to blocks.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self._idle[block] = depth + 1
        self.num_idle += 1
        try:
            self.top.insert(block, key, depth)
        except BaseException as error:
            self._keep("insert", error)

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        try:
            self.top.hit(block, key)
        except BaseException as error:
            self._keep("hit", error)

    def remove(self, block: i64) -> None:
        """`block` is idle no longer."""
        self._idle[block] = 0
        self.num_idle -= 1
        try:
            self.top.remove(block)
        except BaseException as error:
            self._keep("remove", error)

    def insert_run(self, blocks: vec[i64], count: i64, keys: vec[i64]) -> None:
        """Say that the first `count` of `blocks` are idle, each at depth 0. keys: of all blocks. O(count) calls."""
        told: i64 = 0
        if self.states is not None and self.states is self.top:
            told = self.states.insert_needed(blocks, count, keys, self._idle)
            self.num_idle += told
        for place in range(count if told < count else 0):
            if self._idle[blocks[place]] == 0:
                self.insert(blocks[place], keys[blocks[place]], 0)

    def remove_run(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Say that those of `blocks[start:start + count]` that were idle are held. O(count) calls."""
        taken: i64 = 0
        if self.states is not None and self.states is self.top:
            taken = self.states.remove_needed(blocks, start, count, self._idle)
            self.num_idle -= taken
        for place in range(start, start + count if taken < count else start):
            if self._idle[i64(blocks[place])] != 0:
                self.remove(i64(blocks[place]))

    def move_state(self, blocks: vec[i32], start: i64, count: i64, number: i64, is_idle: bool, key: i64) -> bool:
        """Say that the parts of a state are idle now, or are no longer; False where only `insert` or `remove` can."""
        states = self.states
        if states is None or states is not self.top:
            return False
        if not states.move_output(blocks, start, count, number, is_idle, key, self._idle):
            return False
        self.num_idle += count if is_idle else -count
        return True

    def judge_again(self, block: i64, key: i64) -> None:
        """Tell the layers that an idle block is idle anew: what they know of it has changed."""
        depth = self._idle[block] - 1
        if depth >= 0:
            self.remove(block)
            self.insert(block, key, depth)

    def num_withheld(self) -> i64:
        """Return how many idle blocks the policy is not asked about, because a state needs them."""
        return 0 if self.states is None else self.states.num_needed

    def gone(self, block: i64) -> None:
        """What `block` cached is gone, chosen or not: a shrinking pool asks no policy."""
        self.sessions.forget_block(block)
        try:
            self.top.gone(block)
        except BaseException as error:
            self._keep("gone", error)

    def clear(self) -> None:
        """No block is idle any more."""
        clear_i64(self._idle)
        self.num_idle = 0
        self.sessions.forget_blocks()
        try:
            self.top.clear()
        except BaseException as error:
            self._keep("clear", error)

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1. Raises MemoryError, and has grown or not then; both are sound."""
        idle = grown_i64(self._idle, num_blocks)
        try:
            self.top.grow(num_blocks)
        except MemoryError:
            raise
        except BaseException as error:
            self._keep("grow", error)
        self._idle = idle

    def _keep(self, method: str, error: BaseException) -> None:
        """The policy raised when it was told something."""
        if not isinstance(error, Exception):
            self.interruption.note(error)
        if not self.failure:
            # The name first: what follows runs the exception's own code.
            self.failure = f"{method} raised {type(error).__name__}"
            self.failure = f"{self.failure}: {text_of(error, self.interruption)}"

    # Victims.

    def error(self) -> PolicyError:
        """What the question raises that comes after a failure."""
        return PolicyError(f"eviction policy {self.name}: {self.failure}; put another in its place")

    def choose(self, count: i64, keys: vec[i64]) -> list[int]:
        """Return `count` victims, which must be there; fewer where tenants' floors leave fewer. keys: of all blocks.

        Raises `PolicyError`; nothing has changed then.
        """
        if count > 0 and self.failure:
            raise self.error()
        victims: list[int] = []
        while count > 0 and (self.shares is None or self.shares.has_more()):
            problem = self._choose_one(victims, keys)
            if problem:
                self._put_back(victims, keys)
                raise PolicyError(f"eviction policy {self.name}: {problem}")
            count -= 1
        for victim in victims:
            self._idle[i64(victim)] = 0
        self.num_idle -= i64(len(victims))
        return victims

    def _choose_one(self, victims: list[int], keys: vec[i64]) -> str:
        """Ask for one more victim; returns what is wrong with the answer."""
        try:
            block = index_of(self.top.evict())
        except Exception as error:
            return f"evict raised {type(error).__name__}: {text_of(error, self.interruption)}"
        except BaseException:
            self._put_back(victims, keys)
            raise
        if not NONE < block < len(self._idle) or self._idle[i64(block)] == 0:
            return f"evict returned block {block}, which is not idle"
        if self._idle[i64(block)] < 0:
            return f"evict returned block {block} twice"
        self._idle[i64(block)] = -self._idle[i64(block)]
        victims.append(block)
        return ""

    def _put_back(self, victims: list[int], keys: vec[i64]) -> None:
        for victim in victims:
            block = i64(victim)
            self.num_idle -= 1
            self.insert(block, keys[block], -self._idle[block] - 1)

    # Retention, and time.

    @property
    def num_retained(self) -> int:
        """Blocks that are retained."""
        return 0 if self.retention is None else self.retention.num_retained

    def is_retained(self, block: int) -> bool:
        """Whether the block has a priority above 0."""
        return self.retention is not None and self.retention.is_retained(block)

    def retain(self, block: int, priority: int, expires_at: float | None) -> None:
        """Give a cached block a priority, if blocks can be retained here."""
        if self.retention is not None:
            try:
                self.retention.set_priority(block, priority, expires_at)
            except BaseException as error:
                self._keep("remove" if priority > 0 else "insert", error)

    def advance(self, now: float) -> None:
        """It is `now`: retentions end. O(log n) for each that ends."""
        try:
            self.top.advance(now)
        except BaseException as error:
            self._keep("advance", error)

    # Sessions. O(log sessions) a call.

    def make_session_room(self) -> bool:
        """Have a free slot for a session, or say that none can be had. Raises MemoryError."""
        has_room = self.sessions.make_room()
        if self.hints is not None and self.hints.num_slots < self.sessions.num_slots:
            self.hints.grow_slots()
        return has_room

    def say(self, slot: i64, is_over: bool) -> None:
        """Say that a session is over, or that nothing is known of it."""
        was_over = self.sessions.is_over(slot)
        self.sessions.say(slot, is_over)
        if self.states is not None and was_over != is_over:
            self.states.registry.set_session_over(self.sessions.number(slot), is_over)
        if self.hints is not None:
            self.hints.restate(slot)

    def begin_sequence(self, slot: i64) -> i64:
        """A new sequence of a session: what was said is over, and what it held is old. Returns the sequence's tag."""
        self.sessions.hear(slot)
        self.say(slot, False)
        if self.hints is not None:
            self.hints.supersede(slot)
        return self.sessions.begin(slot)

    def forget_session(self, slot: i64) -> None:
        """Forget a session; its slot is free."""
        self.say(slot, False)
        if self.hints is not None:
            self.hints.forget(slot)
        self.sessions.close(slot)

    def num_hinted_evictions(self) -> int:
        """Blocks that were evicted because of a hint."""
        of_states = 0 if self.states is None else int(self.states.num_over)
        return of_states + (0 if self.hints is None else int(self.hints.num_evicted))

    def check(self, idle: set[int]) -> None:
        """The policy was told of exactly the idle blocks, and is sound unless it has failed. O(num_blocks)."""
        told = {block for block in range(len(self._idle)) if self._idle[i64(block)] != 0}
        if told != idle:
            raise InvariantError(f"policy: it was told that {sorted(told)} are idle; {sorted(idle)} are")
        if self.num_idle != len(told):
            raise InvariantError(f"policy: {len(told)} blocks are idle, the count says {self.num_idle}")
        if self.states is not None:
            self.states.registry.check_sessions(self.sessions)
        if not self.failure:
            self.top.check()
        elif self.retention is not None:
            self.retention.check_wishes()


def text_of(error: BaseException, interruption: Interruption) -> str:
    """What an exception says, or that it cannot: its `__str__` is the user's code too."""
    try:
        return str(error)
    except BaseException as second:
        if not isinstance(second, Exception):
            interruption.note(second)
        return f"its text raised {type(second).__name__}"
