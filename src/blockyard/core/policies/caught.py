"""A policy of the user's: what its callbacks raise is caught, so that the pool's change is finished."""

from mypy_extensions import i64

from ...errors import PolicyError
from ..gate import Interruption
from .base import EvictionPolicy
from .hinted import Hinted
from .nested import innermost, name_of, put_hints
from .sessions import Sessions


def text_of(error: BaseException, interruption: Interruption) -> str:
    """What an exception says, or that it cannot: its `__str__` is the user's code too."""
    try:
        return str(error)
    except BaseException as second:
        if not isinstance(second, Exception):
            interruption.note(second)
        return f"its text raised {type(second).__name__}"


class CaughtPolicy(EvictionPolicy):
    """Passes everything on to `policy`. What it raises when it is told something is kept.

    An ordinary exception marks the policy as failed: the next question raises `PolicyError`. A KeyboardInterrupt,
    SystemExit or the like marks it too, because it may have missed what it was told, and goes to `interruption`: the
    call that runs is finished or undone, and then it is raised. What `evict` raises is raised: nothing has changed yet.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, interruption: Interruption) -> None:
        super().__init__(num_blocks)
        self.policy = policy
        self.name = name_of(policy)
        self.interruption = interruption
        #: What it raised first; "" while it has not.
        self.failure = ""

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        try:
            self.policy.insert(block, key, depth)
        except BaseException as error:
            self._keep("insert", error)

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        try:
            self.policy.hit(block, key)
        except BaseException as error:
            self._keep("hit", error)

    def remove(self, block: i64) -> None:
        """`block` is idle no longer."""
        try:
            self.policy.remove(block)
        except BaseException as error:
            self._keep("remove", error)

    def needs_paths(self) -> bool:
        """As the policy wants it; what it raises is a `PolicyError`."""
        try:
            return self.policy.needs_paths()
        except Exception as error:
            raise self._asked("needs_paths", error)

    def _asked(self, method: str, error: Exception) -> PolicyError:
        text = text_of(error, self.interruption)
        return PolicyError(f"eviction policy {self.name}: {method} raised {type(error).__name__}: {text}")

    # Hints go to the policy that chooses, inside of all guards.

    def takes_hints(self) -> bool:
        """As the policy inside wants it; what it raises is a `PolicyError`."""
        try:
            return innermost(self.policy).takes_hints()
        except Exception as error:
            raise self._asked("takes_hints", error)

    def let_hint(self, sessions: Sessions, num_blocks: int, idle: list[int]) -> Hinted:
        """Put hints around the policy that chooses. idle: the blocks that it knows as idle. Raises `PolicyError`."""
        try:
            self.policy, layer = put_hints(self.policy, num_blocks, sessions, idle)
        except MemoryError:
            raise
        except Exception as error:
            raise self._asked("needs_hints", error)
        return layer

    def restate(self, layer: Hinted, slot: i64) -> None:
        """What is known of a session has changed, which may give the policy blocks back."""
        try:
            layer.restate(slot)
        except BaseException as error:
            self._keep("hinted" if layer.tells else "insert", error)

    def follows(self, block: i64, parent: i64) -> None:
        """What stands before `block`."""
        try:
            self.policy.follows(block, parent)
        except BaseException as error:
            self._keep("follows", error)

    def miss(self, key: i64) -> None:
        """A content is asked for that is not cached."""
        try:
            self.policy.miss(key)
        except BaseException as error:
            self._keep("miss", error)

    def evict(self) -> i64:
        """The policy's choice, whatever it is; what it raises is raised."""
        return self.policy.evict()

    def clear(self) -> None:
        """No block is idle any more."""
        try:
            self.policy.clear()
        except BaseException as error:
            self._keep("clear", error)

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1. A lack of memory is raised: the pool does not grow then."""
        try:
            self.policy.grow(num_blocks)
        except MemoryError:
            raise
        except BaseException as error:
            self._keep("grow", error)

    def _keep(self, method: str, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self.interruption.note(error)
        if not self.failure:
            # The name first: what follows runs the exception's own code.
            self.failure = f"{method} raised {type(error).__name__}"
            self.failure = f"{self.failure}: {text_of(error, self.interruption)}"

    def raise_interruption(self) -> None:
        """Raise what interrupted a callback, now that what it interrupted is undone."""
        self.interruption.raise_now()

    def check(self) -> None:
        """The policy is sound, unless it has failed and is asked no more."""
        if not self.failure:
            self.policy.check()
