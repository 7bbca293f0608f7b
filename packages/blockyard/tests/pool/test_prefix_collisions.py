"""The prefix index under attack: prompts made to collide never hit one another's blocks, and nothing gets lost (I5)."""

from __future__ import annotations

import random

import pytest

from blockyard.core.index.checking import check_index
from blockyard.core.index.hashing import root_hash
from blockyard.core.index.prefix_index import TILE_BLOCKS
from blockyard_testing.seeds import run_seed

from ..support.hash_chains import (
    Block,
    Chains,
    block_of_sum,
    blocks_at,
    random_block,
    random_blocks,
    sum_of,
    twin_of,
    twin_of_plain_sums,
)


def test_a_solved_twin_collides_whole_and_is_not_hit() -> None:
    draw, chains = random.Random(1), Chains()
    victim = random_block(draw)
    thief = twin_of(victim, chains.keys, draw)
    assert chains.hash_of(victim) == chains.hash_of(thief)
    block = chains.add([victim])
    assert chains.find([victim]) == [block]
    assert chains.find([thief]) == []
    check_index(chains.index)


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_no_twin_works_under_every_seed(seed: int) -> None:
    """Tokens that differ in their highest bits alone hash differently: nobody floods a table whose seed is secret."""
    chains = Chains(seed=seed)
    victim = (1, 2, 3, 4)
    thief = twin_of_plain_sums(victim)
    both = (*thief[:3], thief[3] + 2**30)
    half = (1, 2 + 2**29, 3, 4 + 2**29)
    assert len({chains.hash_of(block) for block in (victim, thief, both, half)}) == 4
    block = chains.add([victim])
    assert chains.find([thief]) == []
    other = chains.add([thief])
    assert (chains.find([victim]), chains.find([thief])) == ([block], [other])
    check_index(chains.index)


def test_fifty_equal_hashes_are_all_found() -> None:
    """All have one home, so they fill fifty slots in a row; each is found, and each removal closes the gap."""
    draw, chains = random.Random(2), Chains()
    first = random_block(draw)
    blocks = [first, *(twin_of(first, chains.keys, draw) for _ in range(49))]
    assert len({chains.hash_of(block) for block in blocks}) == 1
    assert len(set(blocks)) == 50
    ids = {block: chains.add([block]) for block in blocks}
    home, slots = chains.home_of(first), chains.slots()
    assert [slots[(home + step) % len(slots)] for step in range(51)] == [*ids.values(), 0]
    draw.shuffle(blocks)
    while blocks:
        gone = blocks.pop()
        chains.index.remove(ids[gone])
        check_index(chains.index)
        assert chains.find([gone]) == []
        assert [chains.find([block]) for block in blocks] == [[ids[block]] for block in blocks]
    assert set(chains.slots()) == {0}


def test_equal_tokens_under_colliding_parents() -> None:
    """P and Q collide, so P+C and Q+C have one hash and C's tokens are the same: only the parent's identity tells.

    Whoever compares a block's own tokens alone hands Q+C the keys and values computed under P.
    """
    draw, chains = random.Random(3), Chains()
    p, c = random_block(draw), random_block(draw)
    q = twin_of(p, chains.keys, draw)
    p_id, q_id = chains.add([p]), chains.add([q])
    under_p = chains.add([p, c])
    assert chains.index.chain_hash[p_id] == chains.index.chain_hash[q_id]
    assert chains.find([p, c]) == [p_id, under_p]
    assert chains.find([q, c]) == [q_id]
    under_q = chains.add([q, c])
    assert chains.index.chain_hash[under_p] == chains.index.chain_hash[under_q]
    assert chains.find([p, c]) == [p_id, under_p]
    assert chains.find([q, c]) == [q_id, under_q]
    chains.index.remove(under_p)
    assert chains.find([p, c]) == [p_id]
    assert chains.find([q, c]) == [q_id, under_q]
    check_index(chains.index)


def test_a_root_hash_is_no_content() -> None:
    """A prompt cannot begin in the middle of another one by colliding with its chain: the root has an identity."""
    draw, chains = random.Random(18), Chains()
    a, b = random_blocks(draw, 2)
    chains.add([a])
    chains.add([a, b])
    # b' has the hash, as a first block, that b has after a: their sums differ by what the chains differ by.
    first = chains.index.chain_hash[1]
    gap = first - root_hash(chains.root)
    solved = block_of_sum(sum_of(b, chains.keys) + gap, chains.keys, draw)
    assert chains.hash_of(solved) == chains.index.chain_hash[2]
    assert chains.find([solved]) == []
    assert chains.find([b]) == []


# ---------------------------------------------------------------- tiles


def hostile_chain(chains: Chains, length: int, draw: random.Random) -> tuple[list[Block], list[int]]:
    """A prompt at each of whose blocks a colliding one came first under the same parent: every probe errs once."""
    prompt: list[Block] = []
    ids = []
    for _ in range(length):
        block = random_block(draw)
        chains.add([*prompt, twin_of(block, chains.keys, draw)])
        prompt.append(block)
        ids.append(chains.add(prompt))
    return prompt, ids


def test_false_candidates_everywhere_in_three_tiles() -> None:
    draw, length = random.Random(7), 2 * int(TILE_BLOCKS) + 3
    chains = Chains(num_blocks=2 * length + 2)
    prompt, ids = hostile_chain(chains, length, draw)
    for end in (1, 2, 63, 64, 65, 127, 128, 129, length):
        assert chains.find(prompt[:end]) == ids[:end]
    check_index(chains.index)


@pytest.mark.parametrize("position", [0, 1, 62, 63, 64, 65, 127, 128, 129])
def test_a_look_up_ends_where_the_prompt_differs(position: int) -> None:
    """By a block that collides with the cached one, or by any other; before, in and behind the edge of a tile."""
    draw, length = random.Random(8), 130
    chains = Chains(num_blocks=length + 2)
    prompt = random_blocks(draw, length)
    ids = [chains.add(prompt[: end + 1]) for end in range(length)]
    twin = twin_of(prompt[position], chains.keys, draw)
    for stranger in (twin, random_block(draw), (*prompt[position][:3], prompt[position][3] ^ 1)):
        other = [*prompt[:position], stranger, *prompt[position + 1 :]]
        assert chains.find(other) == ids[:position]
    assert chains.find(prompt) == ids


# ---------------------------------------------------------------- the table


def test_a_run_goes_round_the_end_of_the_table() -> None:
    """Three blocks at home in the last slot of sixteen: the second and third stand in slots 0 and 1."""
    draw, chains = random.Random(9), Chains(num_blocks=8)
    blocks = blocks_at(chains, {15: 3}, draw)
    ids = [chains.add([block]) for block in blocks]
    slots = chains.slots()
    assert len(slots) == 16
    assert [slots[15], slots[0], slots[1]] == ids
    assert [chains.find([block]) for block in blocks] == [[block_id] for block_id in ids]


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_gap_is_closed_across_the_end_of_the_table(removed: int) -> None:
    draw, chains = random.Random(10), Chains(num_blocks=8)
    blocks = blocks_at(chains, {15: 3}, draw)
    ids = [chains.add([block]) for block in blocks]
    chains.index.remove(ids[removed])
    left = [block_id for block_id in ids if block_id != ids[removed]]
    slots = chains.slots()
    assert [slots[15], slots[0], slots[1]] == [*left, 0]
    assert chains.find([blocks[removed]]) == []
    check_index(chains.index)


def test_closing_a_gap_moves_no_block_before_its_home() -> None:
    """Homes 14, 15, 15, 0, 1 stand in 14, 15, 0, 1, 2. Without the first, the one at home in 15 must not go to 14."""
    draw, chains = random.Random(12), Chains(num_blocks=8)
    a, b, c, d, e = (blocks_at(chains, {home: 1}, draw)[0] for home in (14, 15, 15, 0, 1))
    ids = [chains.add([block]) for block in (a, b, c, d, e)]
    order = [14, 15, 0, 1, 2]
    assert [chains.slots()[slot] for slot in order] == ids
    chains.index.remove(ids[0])
    assert [chains.slots()[slot] for slot in order] == [0, *ids[1:]]
    chains.index.remove(ids[1])
    # c moves home to 15, d to 0, e to 1: each comes one nearer, none goes too far.
    assert [chains.slots()[slot] for slot in order] == [0, ids[2], ids[3], ids[4], 0]
    chains.index.remove(ids[3])
    assert [chains.slots()[slot] for slot in order] == [0, ids[2], 0, ids[4], 0], "e is at home and stays"
    assert chains.find([c]) == [ids[2]]
    assert chains.find([e]) == [ids[4]]


def test_random_insertion_and_removal_in_a_crowded_table() -> None:
    """Few homes, at the end and the beginning of the table, some hashes equal: runs merge, wrap and fall apart."""
    draw = random.Random(run_seed())
    chains = Chains(num_blocks=32)
    pool = blocks_at(chains, {62: 4, 63: 6, 0: 4, 1: 4, 2: 2, 40: 2}, draw)
    pool += [twin_of(block, chains.keys, draw) for block in pool[:8] for _ in range(3)]
    held: dict[Block, int] = {}
    free = list(range(1, 32))
    for _ in range(800):
        block = draw.choice(pool)
        if block in held:
            free.append(held[block])
            chains.index.remove(held.pop(block))
        elif free:
            held[block] = free.pop(draw.randrange(len(free)))
            chains.put([block], held[block])
        check_index(chains.index)
        assert chains.index.num_indexed == len(held)
        for other in pool:
            assert chains.find([other]) == ([held[other]] if other in held else [])


def test_random_chains_and_duplicates_in_a_crowded_table() -> None:
    """Depth and duplicates as well: a dict from full prefixes to blocks, oldest first, is all there is to know."""
    draw = random.Random(run_seed() + 1)
    chains = Chains(num_blocks=24)
    alphabet = blocks_at(chains, {47: 2, 46: 1}, draw)
    alphabet += [twin_of(alphabet[0], chains.keys, draw), twin_of(alphabet[0], chains.keys, draw)]
    held: dict[tuple[Block, ...], list[int]] = {}
    prefix_of: dict[int, tuple[Block, ...]] = {}
    free = list(range(1, 24))
    for _ in range(1500):
        prompt = [draw.choice(alphabet) for _ in range(draw.randint(1, 4))]
        ids = chains.find(prompt)
        known = [held[tuple(prompt[:end])][0] for end in range(1, 5) if tuple(prompt[:end]) in held][: len(prompt)]
        assert ids == known
        grows = draw.random() < 0.6
        if grows and free:
            prefix = tuple(prompt[: draw.randint(1, min(len(ids) + 1, len(prompt)))])
            block = free.pop(0)
            chains.put(prefix, block)
            held.setdefault(prefix, []).append(block)
            prefix_of[block] = prefix
        elif prefix_of:
            block = draw.choice(list(prefix_of))
            prefix = prefix_of.pop(block)
            free.append(block)
            chains.index.remove(block)
            if prefix in held and block in held[prefix]:
                held[prefix].remove(block)
                if not held[prefix]:
                    cut_off(held, prefix)
        check_index(chains.index)
        assert chains.index.num_indexed == len(prefix_of)


def cut_off(held: dict[tuple[Block, ...], list[int]], prefix: tuple[Block, ...]) -> None:
    """A content without a block takes all below it along: they hang on an identity that never comes back."""
    for other in [key for key in held if key[: len(prefix)] == prefix]:
        del held[other]
