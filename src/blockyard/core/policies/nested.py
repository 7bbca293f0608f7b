"""Policies around policies: the guards that stand around the one that chooses, and hints put inside of them."""

from .base import EvictionPolicy
from .guarded import Guarded
from .hinted import Hinted
from .sessions import Sessions


def guards(policy: EvictionPolicy) -> list[Guarded]:
    """Those that stand around the policy that chooses, the outermost first; none for a policy without."""
    found: list[Guarded] = []
    while isinstance(policy, Guarded):
        found.append(policy)
        policy = policy.policy
    return found


def innermost(policy: EvictionPolicy) -> EvictionPolicy:
    """The policy that chooses, inside of all guards."""
    around = guards(policy)
    return around[len(around) - 1].policy if around else policy


def put_hints(
    policy: EvictionPolicy, num_blocks: int, sessions: Sessions, idle: list[int]
) -> tuple[EvictionPolicy, Hinted]:
    """Hints around the policy that chooses, inside of all guards. Returns what is outermost now, and the hints.

    idle: the blocks that `policy` was told are idle. The policy inside knows those no longer that a guard has had from
    it as its choice and not given yet. O(num_blocks). Raises what `needs_hints` raises; nothing has changed then.
    """
    around = guards(policy)
    waiting = [int(guard.choice()) for guard in around]
    layer = Hinted(innermost(policy), num_blocks, sessions, [block for block in idle if block not in waiting])
    if not around:
        return layer, layer
    around[len(around) - 1].policy = layer
    return policy, layer


def name_of(policy: EvictionPolicy) -> str:
    """The class, and of a guard the one inside it too."""
    if isinstance(policy, Hinted):
        return name_of(policy.policy)
    name = type(policy).__name__
    return f"{name} around {name_of(policy.policy)}" if isinstance(policy, Guarded) else name
