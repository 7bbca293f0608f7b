"""Each tenant has a share of a pool: here stands what it holds and may take, and whose idle block goes first."""

from collections.abc import Sequence
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ....tenants import Roster, TenantGroup
from ...arrays import clear_i32, clear_i64, grown_i32, grown_i64, zeros_i32, zeros_i64
from ..base import EvictionPolicy, Layer
from ..parts.heap import BlockHeap
from ..parts.lists import BlockLists
from ..simple.lru import LRU

#: Where a number has no limit.
NO_LIMIT: Final[i64] = 1099511627776
#: What a tenant has above its floor is divided by its weight in these parts of a block.
SCALE: Final[i64] = 65536
#: Idle blocks beyond `max_idle` put a tenant above all others by this much.
BORROWED: Final[i64] = 35184372088832
#: More than tenants there can be: a tenant's number breaks ties, the lowest first.
TIES: Final[i64] = 16384


class TenantBook:
    """It knows what each tenant and each group of tenants holds, and what is left for it. All operations are O(1).

    A block is charged to one tenant: whose sequence took it, until it is free again or another tenant takes it. A
    tenant's *claim* is what its floor still lacks, `max(0, min_blocks - held)`; a group's is that, or the sum of its
    members' claims, whichever is more. Who takes blocks leaves as many free as all others claim, so the free blocks,
    idle ones included, are never fewer than all claims together, and each tenant can always take what it claims.
    """

    def __init__(self, groups: Sequence[TenantGroup], num_blocks: int, max_num_seqs: int) -> None:
        members = [(member, number) for number, group in enumerate(groups) for member in group.members]
        self.roster = Roster(groups)
        self.names = self.roster.names
        self.num_tenants: i64 = len(members)
        self.num_groups: i64 = len(groups)
        self.group = _numbers([number for _, number in members])
        self.weight = _numbers([member.weight for member, _ in members])
        self.floor = _numbers([member.min_blocks for member, _ in members])
        self.max_held = _numbers([_limit(member.max_held) for member, _ in members])
        self.max_idle = _numbers([_limit(member.max_idle) for member, _ in members])
        self.max_retained = _numbers([_limit(member.max_retained) for member, _ in members])
        self.group_weight = _numbers([group.weight for group in groups])
        self.group_floor = _numbers([group.floor for group in groups])
        self.group_max = _numbers([_limit(group.max_held) for group in groups])
        #: Blocks that each tenant, and each group, holds.
        self.held = zeros_i64(len(members))
        self.group_held = zeros_i64(len(groups))
        #: Cached blocks that each tenant has lost so far.
        self.num_evicted = zeros_i64(len(members))
        #: What its members claim, by group, and what all groups claim.
        self.member_claims = _numbers([sum(member.min_blocks for member in group.members) for group in groups])
        self.claims: i64 = sum(group.floor for group in groups)
        #: The tenant of each block and of each row of the sequences, and whether a block is held.
        self.of_block = zeros_i64(num_blocks)
        self.is_held = zeros_i32(num_blocks)
        self.of_row = zeros_i64(max_num_seqs)
        #: Who takes the blocks that are taken now.
        self.acting: i64 = 0
        #: Tenants and how many blocks each takes next, for victims that are chosen before; those at `_first_ask` to
        #: `_num_asks` are still to be chosen for. -1 asks: for the tenant that takes blocks now.
        self._ask_slot = zeros_i64(2 * max_num_seqs)
        self._ask_count = zeros_i64(2 * max_num_seqs)
        self._first_ask: i64 = 0
        self._num_asks: i64 = -1
        #: Blocks for which victims were chosen and that are not taken yet, by tenant.
        self.chosen_for = zeros_i64(len(members))
        self.chosen_for_group = zeros_i64(len(groups))
        self._chosen_slots = zeros_i64(len(members))
        self._num_chosen_slots: i64 = 0
        self._is_chosen_slot = zeros_i32(len(members))
        #: Tenants whose numbers have changed since they were ranked.
        self.changed = zeros_i64(len(members))
        self.num_changed: i64 = 0
        self._has_changed = zeros_i32(len(members))

    def slot_of(self, keys: tuple[object, ...]) -> i64:
        """Return the number of the tenant that a prompt with these plain keys is of, 0 for "*". O(keys)."""
        return self.roster.number_of(keys)

    # What is held.

    def hold(self, slot: i64, count: i64) -> None:
        """The tenant holds `count` blocks more, or fewer."""
        group = self.group[slot]
        before = max(self.floor[slot] - self.held[slot], 0)
        group_before = self._claim_of(group)
        self.held[slot] += count
        self.group_held[group] += count
        self.member_claims[group] += max(self.floor[slot] - self.held[slot], 0) - before
        self.claims += self._claim_of(group) - group_before
        self.change(slot)

    def _claim_of(self, group: i64) -> i64:
        return max(self.group_floor[group] - self.group_held[group], self.member_claims[group])

    def change(self, slot: i64) -> None:
        """The tenant is to be ranked anew."""
        if self._has_changed[slot] == 0:
            self._has_changed[slot] = 1
            self.changed[self.num_changed] = slot
            self.num_changed += 1

    def ranked(self) -> None:
        """Note that all are ranked who have changed."""
        for index in range(self.num_changed):
            self._has_changed[self.changed[index]] = 0
        self.num_changed = 0

    # What may be taken.

    def room(self, slot: i64, free: i64, watermark: i64 = 0) -> i64:
        """Return how many of `free` blocks the tenant may take now: what others claim aside, and up to its limits.

        watermark: blocks that are to be left besides; within the floor it does not count.
        """
        group = self.group[slot]
        claim = max(self.floor[slot] - self.held[slot], 0)
        members = self.member_claims[group] - claim
        room = free - (self.claims - self._claim_of(group)) - members
        own = max(claim, self.group_floor[group] - self.group_held[group] - members)
        room = max(room - watermark, min(own, room))
        room = min(room, self.max_held[slot] - self.held[slot])
        return min(room, self.group_max[group] - self.group_held[group] - members)

    def most(self, slot: i64, usable: i64, watermark: i64) -> i64:
        """Return how many blocks the tenant can ever hold in a pool of `usable` blocks."""
        return self.roster.most(int(slot), int(usable), int(watermark))

    def limits(self, slot: i64, free: i64) -> str:
        """Say what keeps the tenant from taking more, for an error."""
        group = self.group[slot]
        text = f"tenant {self.names[int(slot)]!r} holds {self.held[slot]} blocks"
        if self.max_held[slot] < NO_LIMIT:
            text += f" of at most {self.max_held[slot]}"
        if self.group_max[group] < NO_LIMIT:
            text += f", its group {self.group_held[group]} of at most {self.group_max[group]}"
        kept = self.claims - self._claim_of(group) + self.member_claims[group]
        kept -= max(self.floor[slot] - self.held[slot], 0)
        return f"{text}; {free} are free, of which {kept} are kept for the floors of others"

    # For whom victims are chosen.

    def ask_none(self) -> None:
        """Victims are for who takes blocks now, unless `ask` says otherwise."""
        self._first_ask = 0
        self._num_asks = -1

    def ask(self, slot: i64, count: i64) -> None:
        """The next victims but those of earlier asks are for `count` blocks of this tenant."""
        self._num_asks = max(self._num_asks, 0)
        if count > 0:
            self._ask_slot[self._num_asks] = slot
            self._ask_count[self._num_asks] = count
            self._num_asks += 1

    def begin(self, num_covered: i64) -> None:
        """Victims are chosen now; the first `num_covered` blocks that were asked for need none, but are taken too."""
        for index in range(self._num_chosen_slots):
            slot = self._chosen_slots[index]
            self._is_chosen_slot[slot] = 0
            self._choose_for(slot, -self.chosen_for[slot])
        self._num_chosen_slots = 0
        while num_covered > 0 and self._first_ask < self._num_asks:
            part = min(num_covered, self._ask_count[self._first_ask])
            num_covered -= part
            self._is_for(self._ask_slot[self._first_ask], part)
            self._use_ask(part)

    def _use_ask(self, count: i64) -> None:
        self._ask_count[self._first_ask] -= count
        if self._ask_count[self._first_ask] == 0:
            self._first_ask += 1

    def requester(self) -> i64:
        """Return the tenant that the next victim is for, -1 for none any more."""
        if self._num_asks < 0:
            return self.acting
        return self._ask_slot[self._first_ask] if self._first_ask < self._num_asks else -1

    def refuse(self) -> bool:
        """There is no victim for the requester; whether there is another one."""
        self._first_ask += 1
        return 0 <= self._first_ask < self._num_asks

    def chosen(self) -> None:
        """A victim was chosen for the requester."""
        slot = self.requester()
        if slot < 0:
            return
        self._is_for(slot, 1)
        if self._num_asks >= 0:
            self._use_ask(1)

    def _is_for(self, slot: i64, count: i64) -> None:
        """Count blocks that the tenant has not taken yet among what it holds."""
        if self._is_chosen_slot[slot] == 0:
            self._is_chosen_slot[slot] = 1
            self._chosen_slots[self._num_chosen_slots] = slot
            self._num_chosen_slots += 1
        self._choose_for(slot, count)

    def taken(self, slot: i64, count: i64) -> None:
        """The tenant has taken `count` blocks, of those that were chosen for it first."""
        self._choose_for(slot, -min(self.chosen_for[slot], count))

    def _choose_for(self, slot: i64, count: i64) -> None:
        if count != 0:
            self.chosen_for[slot] += count
            self.chosen_for_group[self.group[slot]] += count
            self.change(slot)

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. MemoryError changes nothing."""
        of_block = grown_i64(self.of_block, num_blocks)
        is_held = grown_i32(self.is_held, num_blocks)
        self.of_block = of_block
        self.is_held = is_held

    def check(self) -> None:
        """Raise `InvariantError` unless the sums agree with what is held. O(num_blocks + tenants)."""
        held = [0] * int(self.num_tenants)
        for block in range(len(self.is_held)):
            if self.is_held[i64(block)] != 0:
                held[self.of_block[i64(block)]] += 1
        if held != list(self.held):
            raise InvariantError(f"tenants: they hold {held} blocks, counted are {list(self.held)}")
        group_held = [0] * int(self.num_groups)
        claims = [0] * int(self.num_groups)
        for slot in range(self.num_tenants):
            group_held[int(self.group[slot])] += int(self.held[slot])
            claims[int(self.group[slot])] += max(int(self.floor[slot] - self.held[slot]), 0)
        if group_held != list(self.group_held) or claims != list(self.member_claims):
            raise InvariantError(f"tenants: groups hold {group_held} and claim {claims}, counted otherwise")
        chosen = list(self._chosen_slots)[: int(self._num_chosen_slots)]
        for slot in range(self.num_tenants):
            is_known = self.chosen_for[slot] >= 0 and (self.chosen_for[slot] == 0 or slot in chosen)
            if not is_known or (self._is_chosen_slot[slot] != 0) != (slot in chosen):
                raise InvariantError(
                    f"tenants: {self.chosen_for[slot]} blocks are chosen for {slot}, known of {chosen}"
                )
        total = sum(int(self._claim_of(group)) for group in range(self.num_groups))
        if total != self.claims:
            raise InvariantError(f"tenants: {total} blocks are claimed, the count says {self.claims}")


def _limit(value: int | None) -> int:
    return int(NO_LIMIT) if value is None else value


def _numbers(values: list[int]) -> vec[i64]:
    numbers = zeros_i64(len(values))
    for index, value in enumerate(values):
        numbers[index] = value
    return numbers


class Shares(Layer):
    """It says whose idle block goes; `policy` says which one of that tenant's.

    A tenant's *excess* is what it holds and what of its blocks lies idle, less its floor, divided by its weight; a
    group's likewise. The group with the greatest excess gives, and in it the member with the greatest, as long as both
    are above 0. Else no tenant is above its floor but the one for whom room is made, and a block of its own goes: no
    tenant loses a block within its floor to another.

    The policy knows no tenants. What it names of others lies in a list of its tenant until that one gives, in the order
    in which it was named, or until it is hit; so each idle block is named once, which makes it O(1) amortised on top
    of the policy's own cost, and O(log tenants). Under least recently used a block is put into its tenant's list at
    once, which is the same order, without a second one. 28 bytes a block, about 300 a tenant.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, book: TenantBook) -> None:
        super().__init__(policy, num_blocks)
        self.book = book
        tenants = int(book.num_tenants)
        #: Whether every block is in its tenant's list at once.
        self.is_direct = isinstance(policy, LRU)
        #: Lists 2 t: idle blocks of tenant t that the policy has named; 2 t + 1: those that are retained.
        self._lists = BlockLists(2 * tenants, num_blocks)
        self._is_inner = zeros_i32(num_blocks)
        self.idle = zeros_i64(tenants)
        self.group_idle = zeros_i64(int(book.num_groups))
        #: Who has idle blocks, by excess: the members of each group, and groups.
        self._ranks = [BlockHeap(0) for _ in range(int(book.num_groups))]
        self._place = zeros_i64(tenants)
        sizes = [0] * int(book.num_groups)
        self._first = zeros_i64(int(book.num_groups))
        for slot in range(book.num_tenants):
            group = int(book.group[slot])
            if sizes[group] == 0:
                self._first[group] = slot
            self._place[slot] = sizes[group]
            sizes[group] += 1
        for group, size in enumerate(sizes):
            self._ranks[group].grow(size)
        self._groups = BlockHeap(int(book.num_groups))
        self._group_key = zeros_i64(int(book.num_groups))
        self._next: i64 = -1

    # What is idle.

    def _count(self, slot: i64, change: i64) -> None:
        self.idle[slot] += change
        self.group_idle[self.book.group[slot]] += change
        self.book.change(slot)

    def passes(self, block: i64) -> bool:
        """Return whether the policy knows the block as idle."""
        return self._is_inner[block] != 0

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """The block is idle from now on."""
        slot = self.book.of_block[block]
        self._count(slot, 1)
        if self.is_direct:
            self._lists.append(2 * slot, block)
        else:
            self._is_inner[block] = 1
            self.policy.insert(block, key, depth)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._count(self.book.of_block[block], -1)
        if self._is_inner[block] != 0:
            self._is_inner[block] = 0
            self.policy.remove(block)
        else:
            self._lists.remove(block)
            if not self.is_direct:
                super().spared(block)

    def keep(self, block: i64) -> None:
        """The idle `block` is retained: it goes when its tenant has no other."""
        slot = self.book.of_block[block]
        self._count(slot, 1)
        self._lists.append(2 * slot + 1, block)

    def keep_no_more(self, block: i64) -> None:
        """It is retained, or idle, no longer."""
        self._count(self.book.of_block[block], -1)
        self._lists.remove(block)

    # Who gives.

    def has_more(self) -> bool:
        """Return whether a block may be taken for the tenant that asks: no other's floor is broken for it."""
        self._rank()
        while self.book.requester() >= 0:
            if self._chosen_tenant() >= 0:
                return True
            if not self.book.refuse():
                return False
        return False

    def choose(self) -> i64:
        """Return the tenant that gives the next block; some are idle."""
        self._rank()
        slot = self._chosen_tenant()
        if slot < 0:
            slot = self._first_of(self._groups.first())
        return slot

    def _chosen_tenant(self) -> i64:
        """Return the tenant that gives, -1 if none is above its floor, and who asks has nothing idle."""
        if self._groups.num_items == 0:
            return -1
        group = self._groups.first()
        if self._group_key[group] > 0:
            return self._first_of(group)
        asks = self.book.requester()
        if asks < 0:
            return -1
        group = self.book.group[asks]
        if self._ranks[int(group)].num_items > 0 and self._excess(self._first_of(group)) > 0:
            return self._first_of(group)
        return asks if self.idle[asks] > 0 else -1

    def _first_of(self, group: i64) -> i64:
        return self._first[group] + self._ranks[int(group)].first()

    def _excess(self, slot: i64) -> i64:
        book = self.book
        blocks = book.held[slot] + book.chosen_for[slot] + self.idle[slot] - book.floor[slot]
        excess = blocks * SCALE // book.weight[slot]
        return excess + BORROWED if self.idle[slot] > book.max_idle[slot] else excess

    def _rank(self) -> None:
        """Give all a new rank who have changed. O(log tenants) for each."""
        book = self.book
        for index in range(book.num_changed):
            slot = book.changed[index]
            group = book.group[slot]
            ranks = self._ranks[int(group)]
            place = self._place[slot]
            if ranks.holds(place):
                ranks.remove(place)
            if self.idle[slot] > 0:
                ranks.insert(place, place - self._excess(slot) * TIES)
        for index in range(book.num_changed):
            self._rank_group(book.group[book.changed[index]])
        book.ranked()

    def _rank_group(self, group: i64) -> None:
        if self._groups.holds(group):
            self._groups.remove(group)
        if self.group_idle[group] == 0:
            return
        key = self._key_of(group)
        self._group_key[group] = key
        self._groups.insert(group, group - key * TIES)

    def _key_of(self, group: i64) -> i64:
        """Return a group's excess; 0 at most where no member is above its own floor."""
        book = self.book
        first = self._excess(self._first_of(group))
        blocks = book.group_held[group] + book.chosen_for_group[group] + self.group_idle[group]
        key = (blocks - book.group_floor[group]) * SCALE // book.group_weight[group]
        if first >= BORROWED // 2:
            return key + BORROWED
        return min(key, 0) if first <= 0 else key

    def evict(self) -> i64:
        """Take the first block, in the policy's order, of the tenant that gives."""
        slot = self._next if self._next >= 0 else self.choose()
        self._next = -1
        block = self._lists.head(2 * slot)
        if block >= 0:
            self._lists.remove(block)
        else:
            block = self._named(slot)
            if not 0 < block < len(self._is_inner):
                return block
        self._count(slot, -1)
        self.book.chosen()
        return block

    def _named(self, slot: i64) -> i64:
        """Let the policy name blocks until one is the tenant's, which has some that it knows."""
        while True:
            block = self.policy.evict()
            if not 0 < block < len(self._is_inner) or self._is_inner[block] == 0:
                if 0 < block < len(self._is_inner):
                    raise ValueError(f"block {block} was chosen before, or is not idle")
                return block
            self._is_inner[block] = 0
            owner = self.book.of_block[block]
            if owner == slot:
                return block
            self._lists.append(2 * owner, block)

    def has_plain(self, slot: i64) -> bool:
        """Return whether the tenant has idle blocks that are not retained; `evict` takes one of its next then."""
        if self.idle[slot] == self._lists.length[2 * slot + 1]:
            return False
        self._next = slot
        return True

    def retained_of(self, slot: i64) -> list[int]:
        """Return the idle blocks that are retained for a tenant. O(these)."""
        return self._lists.blocks(2 * slot + 1)

    # The size, and checks.

    def clear(self) -> None:
        """No block is idle any more."""
        self._lists.clear()
        clear_i32(self._is_inner)
        clear_i64(self.idle)
        clear_i64(self.group_idle)
        for slot in range(self.book.num_tenants):
            self.book.change(slot)
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1, also where the policy raises; for MemoryError nothing has grown."""
        is_inner = grown_i32(self._is_inner, num_blocks)
        self.book.grow(num_blocks)
        self._lists.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._is_inner = is_inner
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Counts and ranks agree with the lists, and the policy is sound. O(num_blocks). Raises `InvariantError`."""
        self.book.check()
        self._lists.check()
        idle = [0] * int(self.book.num_tenants)
        for block in range(len(self._is_inner)):
            listed = self._lists.list_of(i64(block))
            if listed >= 0 and (self._is_inner[i64(block)] != 0 or listed >> 1 != self.book.of_block[i64(block)]):
                raise InvariantError(f"shares: block {block} is in list {listed}, and the policy's or another tenant's")
            if listed >= 0 or self._is_inner[i64(block)] != 0:
                idle[self.book.of_block[i64(block)]] += 1
        if idle != list(self.idle):
            raise InvariantError(f"shares: tenants have {idle} idle blocks, counted are {list(self.idle)}")
        self._check_ranks()
        self.policy.check()

    def _check_ranks(self) -> None:
        """The member with the greatest excess is first in its group, and the group first of all. O(tenants)."""
        self._rank()
        members: dict[int, tuple[int, int]] = {}
        for slot in range(int(self.book.num_tenants)):
            if self.idle[i64(slot)] > 0:
                group, rank = int(self.book.group[i64(slot)]), (-int(self._excess(i64(slot))), slot)
                members[group] = min(members.get(group, rank), rank)
        firsts = {group: int(self._first_of(i64(group))) for group in members}
        if firsts != {group: slot for group, (_, slot) in members.items()}:
            raise InvariantError(f"shares: {firsts} are first of their groups, by excess {members} are")
        groups = sorted((-int(self._key_of(i64(group))), group) for group in members)
        if int(self._groups.num_items) != len(groups) or (groups and self._groups.first() != groups[0][1]):
            raise InvariantError(f"shares: by excess the groups are {groups}, ranked otherwise")
