"""A pool that is to grow when the system has no memory for it: nothing changes, and the next resize works."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

import blockyard
from blockyard_testing.places import child_environment
from blockyard_testing.seeds import draws, run_seed

from ..support.own_calls import KINDS

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is set as Linux has it"),
    pytest.mark.skipif(not blockyard.compiled(), reason="the arrays of this build are lists, and far larger"),
]

NUM_BLOCKS = 60_000
POLICIES = ["fifo", "lfu", "s3fifo", "arc", "score", "density"]

#: Forks a process for each kind and policy, which lowers its own memory limit and asks for more than that.
PROGRAM = """
import os, re, resource, sys
from blockyard import CapacityError, NotEnoughMemory
from tests.interrupts import state
from tests.support.own_calls import Site

num_blocks = int(sys.argv[1])

def address_space():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))

def refused(target, room):
    limit(address_space() + room)
    try:
        target.resize(num_blocks)
    except NotEnoughMemory as error:
        return error
    finally:
        limit(resource.RLIM_INFINITY)

def without_room(found):
    '''A policy may have room for more already.'''
    return {path: value for path, value in found.items() if ".stack" not in path}

def num_refused(kind, policy):
    site = Site(kind)
    if policy:
        site.cache.set_eviction_policy(policy)
        site.alone.set_eviction_policy(policy)
    count = 0
    for target in (site.cache, site.alone):
        # `check` ranks the tenants that have changed since they were ranked last.
        site.check()
        before = without_room(state(site))
        # In small steps as far as the arrays go, behind the zeros that large ones are copied from; in the end enough.
        zeros = 2**26
        for room in [0, zeros // 4, *range(zeros, zeros + 240 * num_blocks, 8 * num_blocks), 2**28, 2**30]:
            error = refused(target, room)
            if error is None:
                break
            count += 1
            assert isinstance(error, CapacityError) and isinstance(error, MemoryError)
            assert int(re.search(r"([0-9]+) bytes", str(error))[1]) > num_blocks, error
            assert without_room(state(site)) == before, room
            site.check()
        assert error is None, "there was room enough"
        site.check()
        target.resize(40)
        target.resize(num_blocks + 5)
        target.resize(50)
        site.check()
    return count

for side in sys.argv[2:]:
    kind, policy = side.split("|")
    if os.fork() == 0:
        print(side, num_refused(kind, policy), flush=True)
        sys.exit()
    assert os.wait()[1] == 0, side
"""


def test_a_pool_that_cannot_grow_stays_as_it_was() -> None:
    """A sixth of the kinds of managers, and of plain ones with each policy; TEST_DRAWS=6 takes all."""
    whole = [*(f"{kind}|" for kind in KINDS), *(f"plain|{policy}" for policy in POLICIES)]
    sides = random.Random(run_seed()).sample(whole, draws(len(whole), 0))
    # One arena, from which large arrays are apart: what the C library takes beside them is little then.
    environment = child_environment(MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536")
    command = [sys.executable, "-c", PROGRAM, str(NUM_BLOCKS), *sides]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    counts = [line.rpartition(" ") for line in result.stdout.splitlines()]
    assert [side for side, _, _ in counts] == sides
    assert all(int(count) >= 6 for _, _, count in counts), result.stdout
