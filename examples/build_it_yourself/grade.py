"""Grade a free queue and a block pool of your own: python examples/build_it_yourself/grade.py my_pool.py

Your file has two classes; docs/build-it-yourself.md says what each call does. The checks stand in the order in which to
write the code, and each names the invariant that it is about. The exit status is 0 if all pass, else 1.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Check = Callable[[Any, Any], None]
BLOCK_SIZE = 4


def raises(error: type[Exception], call: Callable[[], object]) -> None:
    """Fail unless the call raises this error, or one derived from it."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")


def agree(pool: Any, held: dict[int, int]) -> None:
    """I1: a block is free exactly when nothing holds it, and its ref_cnt is the number of its holders in `held`."""
    free = pool.free_block_ids()
    expected = {block for block in range(1, pool.num_blocks) if held.get(block, 0) == 0}
    assert len(free) == len(set(free)), f"a block stands twice in the queue: {free}"
    assert set(free) == expected, f"free are {sorted(free)}, not {sorted(expected)}"
    assert pool.num_free_blocks == len(free), f"num_free_blocks is {pool.num_free_blocks}, not {len(free)}"
    for block in range(1, pool.num_blocks):
        assert pool.ref_cnt(block) == held.get(block, 0), f"ref_cnt of block {block} is {pool.ref_cnt(block)}"


def check_queue_starts_in_order(queue: Any, _: Any) -> None:
    """A queue of n blocks begins with 1 to n - 1, in order: block 0 is the null block."""
    made = queue(6)
    assert made.get_all_free_blocks() == [1, 2, 3, 4, 5]
    assert made.popleft() == 1
    assert made.popleft_n(2) == [2, 3]
    assert made.num_free_blocks == 2


def check_queue_removes_from_the_middle(queue: Any, _: Any) -> None:
    """I4: any block leaves in O(1), the others keep their order, in both directions."""
    made = queue(8)
    for block in (4, 1, 7, 3):
        made.remove(block)
    assert made.get_all_free_blocks() == [2, 5, 6]
    made.append(4)
    made.remove(6)
    assert made.popleft_n(3) == [2, 5, 4]
    made.append(1)
    assert made.get_all_free_blocks() == [1]


def check_queue_follows_a_list(queue: Any, _: Any) -> None:
    """A thousand random calls have the order of a plain list."""
    draw = random.Random(7)
    made, free, taken = queue(12), list(range(1, 12)), []
    for _step in range(1000):
        if taken and draw.random() < 0.5:
            taken.append(taken.pop(draw.randrange(len(taken))))
            free.append(taken.pop())
            made.append(free[-1])
        elif free and draw.random() < 0.5:
            taken.append(free.pop(draw.randrange(len(free))))
            made.remove(taken[-1])
        elif free:
            taken.append(free.pop(0))
            assert made.popleft() == taken[-1]
        assert made.get_all_free_blocks() == free
        assert made.num_free_blocks == len(free)


def check_pool_counts(_: Any, pool: Any) -> None:
    """I1: a block is in the free queue exactly when its ref_cnt is 0; the null block never is."""
    made = pool(6, BLOCK_SIZE)
    agree(made, {})
    blocks = made.get_new_blocks(3)
    agree(made, dict.fromkeys(blocks, 1))
    made.touch(blocks[:2])
    agree(made, {blocks[0]: 2, blocks[1]: 2, blocks[2]: 1})
    made.free_blocks(blocks)
    agree(made, {blocks[0]: 1, blocks[1]: 1})
    made.free_blocks(blocks[:2])
    agree(made, {})


def check_pool_refuses_whole_calls(_: Any, pool: Any) -> None:
    """I6: a call that cannot do all of its work raises and changes nothing."""
    made = pool(6, BLOCK_SIZE)
    blocks = made.get_new_blocks(3)
    order = made.free_block_ids()
    raises(Exception, lambda: made.get_new_blocks(3))
    assert made.free_block_ids() == order
    agree(made, dict.fromkeys(blocks, 1))


def check_pool_refuses_a_double_free(_: Any, pool: Any) -> None:
    """I8: freeing a free block is an error, also when one call names an id twice; nothing changes."""
    made = pool(6, BLOCK_SIZE)
    first, second = made.get_new_blocks(2)
    made.free_blocks([first])
    raises(Exception, lambda: made.free_blocks([first]))
    raises(Exception, lambda: made.free_blocks([second, first]))
    raises(Exception, lambda: made.free_blocks([second, second]))
    agree(made, {second: 1})


def check_pool_hits_full_blocks(_: Any, pool: Any) -> None:
    """I3: only full blocks are cached, and a hit is held before it is returned."""
    made = pool(8, BLOCK_SIZE)
    blocks = made.get_new_blocks(3)
    made.cache_full_blocks(blocks, list(range(10)))  # two full blocks, and two tokens
    hit = made.get_cached_blocks([*range(10), 10, 11])
    assert hit == blocks[:2], f"hit {hit}, not {blocks[:2]}"
    agree(made, {blocks[0]: 2, blocks[1]: 2, blocks[2]: 1})


def check_pool_hits_whole_prefixes(_: Any, pool: Any) -> None:
    """I5: equal tokens after a different prefix do not hit."""
    made = pool(8, BLOCK_SIZE)
    made.cache_full_blocks(made.get_new_blocks(2), [1, 1, 1, 1, 2, 2, 2, 2])
    assert made.get_cached_blocks([2, 2, 2, 2]) == []
    assert made.get_cached_blocks([3, 3, 3, 3, 2, 2, 2, 2]) == []
    assert len(made.get_cached_blocks([1, 1, 1, 1, 3, 3, 3, 3])) == 1


def check_pool_compares_tokens(_: Any, pool: Any) -> None:
    """I5: a hash may collide (Python's own does: hash(-1) == hash(-2)); tokens are compared."""
    made = pool(8, BLOCK_SIZE)
    made.cache_full_blocks(made.get_new_blocks(1), [-1, -1, -1, -1])
    assert made.get_cached_blocks([-2, -2, -2, -2]) == []


def check_pool_keeps_equal_blocks_apart(_: Any, pool: Any) -> None:
    """I2: equal blocks are not merged, and their content hits while one of them is cached."""
    made = pool(4, BLOCK_SIZE)
    first, second = made.get_new_blocks(1), made.get_new_blocks(1)
    for blocks in (first, second):
        made.cache_full_blocks(blocks, [1, 2, 3, 4])
    made.free_blocks(first)
    [_third, taken] = made.get_new_blocks(2)  # evicts the first of the two equal blocks
    assert taken == first[0]
    assert made.get_cached_blocks([1, 2, 3, 4]) == second


def check_pool_revives(_: Any, pool: Any) -> None:
    """I4: a freed block can still be hit; the hit takes it out of the middle of the free queue."""
    made = pool(6, BLOCK_SIZE)
    blocks = made.get_new_blocks(2)
    made.cache_full_blocks(blocks, list(range(8)))
    made.free_blocks(blocks)
    agree(made, {})
    assert made.get_cached_blocks(list(range(8))) == blocks
    agree(made, dict.fromkeys(blocks, 1))


def check_pool_evicts_suffixes_first(_: Any, pool: Any) -> None:
    """A sequence is freed from its tail, so its prefix is evicted last; an evicted block is never hit."""
    made = pool(4, BLOCK_SIZE)
    blocks = made.get_new_blocks(3)
    made.cache_full_blocks(blocks, list(range(12)))
    made.free_blocks(blocks)
    assert made.get_new_blocks(1) == [blocks[2]]
    assert made.get_cached_blocks(list(range(12))) == blocks[:2]


def check_pool_follows_counts(_: Any, pool: Any) -> None:
    """I1 and I5 after each of a thousand random calls: the counts, and the content of each block that is hit."""
    draw = random.Random(11)
    made, held, content, live = pool(10, BLOCK_SIZE), dict.fromkeys(range(10), 0), {}, []
    for _step in range(1000):
        tokens = [draw.randrange(2) for _ in range(BLOCK_SIZE * draw.randint(1, 3))]
        if live and draw.random() < 0.5:
            for block in (blocks := live.pop(draw.randrange(len(live)))):
                held[block] -= 1
            made.free_blocks(blocks)
        else:
            blocks = made.get_cached_blocks(tokens)
            for position, block in enumerate(blocks):
                expected = tokens[: (position + 1) * BLOCK_SIZE]
                assert content.get(block) == expected, f"block {block} was hit as {expected}: {content.get(block)}"
            missing = len(tokens) // BLOCK_SIZE - len(blocks)
            num_hit = len(blocks)
            if missing <= made.num_free_blocks:
                blocks = [*blocks, *made.get_new_blocks(missing)]
                made.cache_full_blocks(blocks, tokens, num_hit)
            for position, block in enumerate(blocks):
                held[block] += 1
                content[block] = tokens[: (position + 1) * BLOCK_SIZE]
            live.append(blocks)
        agree(made, held)


@contextmanager
def time_limit() -> Iterator[None]:
    """Stop each check after one second: a walk along a list whose links form a circle never ends."""

    def stop(*_: object) -> None:
        raise TimeoutError("it did not end in a second; do the links go round in a circle?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


CHECKS: list[Check] = [check for name, check in list(globals().items()) if name.startswith("check_")]


def grade(queue: Any, pool: Any) -> dict[str, str]:
    """Return each check's result: "" if it passed, else the first thing that was wrong."""
    found = {}
    for check in CHECKS:
        try:
            with time_limit():
                check(queue, pool)
            found[check.__name__] = ""
        except Exception as error:
            found[check.__name__] = f"{type(error).__name__}: {error}".rstrip(": ")
    return found


def missing(name: str) -> Callable[..., Any]:
    """Return a stand-in for a class that the file does not have yet: the checks that need the class fail and say so."""

    def make(*_: int) -> Any:
        raise NameError(f"your file has no {name} yet")

    return make


def main(path: str) -> int:
    """Check the classes in a file and print a line for each check."""
    names = runpy.run_path(path)
    found = grade(*(names.get(name, missing(name)) for name in ("FreeQueue", "BlockPool")))
    for check in CHECKS:
        wrong = found[check.__name__]
        print(f"{'FAILED' if wrong else 'passed'}  {check.__name__}")
        if wrong:
            print(f"        {check.__doc__}\n        {wrong}")
    print(f"{list(found.values()).count('')} of {len(CHECKS)} passed")
    return int(any(found.values()))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not os.path.isfile(sys.argv[1]):
        sys.exit(f"usage: python {sys.argv[0]} FILE.py, a file that has your FreeQueue and BlockPool")
    sys.exit(main(sys.argv[1]))
