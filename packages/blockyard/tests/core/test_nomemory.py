"""A part of `python -m tests.nomemory`: after a failed allocation `check()` holds; a resize or swap changed nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from librt.vecs import vec
from mypy_extensions import i64

import blockyard
from blockyard.core.policies.states.orders import make_order
from blockyard.core.policies.states.prefix_tree import FEWEST_NODES
from blockyard.core.policies.states.registry import CheckpointRegistry
from blockyard_testing.places import child_environment
from blockyard_testing.seeds import run_seed

from ..nomemory import KINDS, NAMES, STATE_CALLS, STATE_KINDS

_testcapi = pytest.importorskip("_testcapi")

#: What stands before the first node.
NO_NODE = 0
#: What a child says of an allocation that failed, and of one that was not made.
SOUND, DONE = 10, 11


@pytest.mark.skipif(not blockyard.compiled(), reason="of interpreted code each line may fail in the middle")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each allocation fails in a fork of the process")
def test_a_failed_allocation_breaks_nothing() -> None:
    """Each run draws a resize or a swap with a CPU pool, and three other calls on another kind of manager."""
    draw = random.Random(run_seed())
    moves = ["resize", "swap_out", "swap_in"]
    sweep([draw.choice(moves)], ["cpu"])
    kind = draw.choice([*KINDS, *STATE_KINDS])
    names = NAMES if kind in KINDS else [call.name for call in STATE_CALLS]
    sweep(draw.sample([name for name in names if name not in moves], 3), [kind])


@pytest.mark.skipif(not blockyard.compiled(), reason="of interpreted code each line may fail in the middle")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each allocation fails in a fork of the process")
def test_failed_allocation_leaves_hints_leases_and_tenants_sound() -> None:
    """A lease was live that held nothing, and a sequence had no blocks: by one of these calls in each run."""
    name = random.Random(run_seed()).choice(["hint", "touch", "try_allocate"])
    sweep([name], ["everything with a CPU pool"])


def sweep(names: list[str], kinds: list[str]) -> None:
    """Fail each allocation of these calls on these kinds of managers; nothing may be wrong afterwards."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.nomemory", *names]
    command += [word for kind in kinds for word in ("--kind", kind)]
    run = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "unchanged" in run.stdout


def full_registry() -> CheckpointRegistry:
    """All nodes are taken that there is room for."""
    registry = CheckpointRegistry(make_order("index", 16), 16, 4000, 8)
    for key in range(1, FEWEST_NODES):
        registry.tree.add(key, NO_NODE)
    return registry


def one_more_node() -> Callable[[], None]:
    tree = full_registry().tree

    def act() -> None:
        assert tree.add(FEWEST_NODES, NO_NODE) == tree.find(FEWEST_NODES) == FEWEST_NODES

    return act


def blocks_at_a_new_node() -> Callable[[], None]:
    registry = full_registry()
    node = registry.tree.add(FEWEST_NODES, NO_NODE)

    def act() -> None:
        registry.block_map.add_block(1, node, 0)
        assert registry.block_map.blocks_at(node) == [1]
        registry.block_map.check()

    return act


def an_output_of_one_more_block() -> Callable[[], None]:
    registry = full_registry()
    request = registry.begin_request(vec[i64]([1, 2]), 2, 0)

    def act() -> None:
        if request.num_nodes == 2:
            registry.extend(request, 3)
        assert (request.num_nodes, request.nodes[2]) == (3, registry.tree.find(3))

    return act


def said_by_a_child(act: Callable[[], None], number: int) -> int:
    """Fail its allocation of this number, then do it again."""
    child = os.fork()
    if child == 0:
        said = 1
        try:
            _testcapi.set_nomemory(number, number + 1)
            try:
                act()
                said = DONE
            except MemoryError:
                said = SOUND
            finally:
                _testcapi.remove_mem_hooks()
            if said == SOUND:
                act()
        except BaseException:
            said = 1
        finally:
            os._exit(said)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not blockyard.compiled(), reason="of interpreted code each line may fail in the middle")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each allocation fails in a fork of the process")
@pytest.mark.parametrize("make", [one_more_node, blocks_at_a_new_node, an_output_of_one_more_block])
def test_records_of_states_grow_after_a_failed_allocation(make: Callable[[], Callable[[], None]]) -> None:
    """Of two arrays one had grown: from then on the sequence could not be freed."""
    act = make()
    said = [said_by_a_child(act, number) for number in range(1, 30)]
    assert SOUND in said
    assert DONE in said
    assert 1 not in said
