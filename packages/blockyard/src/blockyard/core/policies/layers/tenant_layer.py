"""The layer that chooses the tenant whose idle block is evicted."""

from typing import Final

from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import clear_i32, clear_i64, grown_i32, zeros_i32, zeros_i64
from ...budget import SharedBudget
from ..base import EvictionPolicy, Layer
from ..parts.heap import BlockHeap
from ..parts.lists import BlockLists
from ..simple.lru import LRU

#: A tenant's excess is counted in these parts of a block.
SCALE: Final[i64] = 65536
#: Added to the excess of a tenant with more idle blocks than `max_idle`: more than any other excess.
BORROWED: Final[i64] = 35184372088832
#: More than there can be tenants: among equals the tenant with the lowest number comes first.
TIES: Final[i64] = 16384


class TenantLayer(Layer):
    """Chooses the tenant whose idle block is evicted; `policy` chooses among that tenant's blocks.

    A tenant's *excess* is the number of its held and idle blocks, minus its guarantee, divided by its weight; a group's
    likewise. If excesses are above 0, the group with the greatest gives a block, and in it the member with the
    greatest. Otherwise only the tenant that takes the block may be above its guarantee, and gives an idle block itself:
    no tenant loses a block within its guarantee to another.

    The policy knows no tenants. If it names a block of a tenant that does not give, that block waits in a list of its
    tenant until the tenant gives or the block is hit. So each idle block is named once: O(1) amortised on top of the
    policy's own cost, and O(log tenants). With least recently used every block is put into its tenant's list at once,
    which gives the same order. 28 bytes a block, about 300 a tenant.
    """

    def __init__(self, policy: EvictionPolicy, num_blocks: int, budget: SharedBudget) -> None:
        super().__init__(policy, num_blocks)
        self.budget = budget
        tenants = int(budget.num_tenants)
        #: Whether every block is in its tenant's list at once.
        self.is_direct = isinstance(policy, LRU)
        #: Lists 2 t: idle blocks of tenant t that the policy has named; 2 t + 1: those that are retained.
        self._lists = BlockLists(2 * tenants, num_blocks)
        self._is_inner = zeros_i32(num_blocks)
        self.idle = zeros_i64(tenants)
        self.group_idle = zeros_i64(int(budget.num_groups))
        #: Who has idle blocks, by excess: the members of each group, and groups.
        self._ranks = [BlockHeap(0) for _ in range(int(budget.num_groups))]
        self._place = zeros_i64(tenants)
        sizes = [0] * int(budget.num_groups)
        self._first = zeros_i64(int(budget.num_groups))
        for slot in range(budget.num_tenants):
            group = int(budget.group[slot])
            if sizes[group] == 0:
                self._first[group] = slot
            self._place[slot] = sizes[group]
            sizes[group] += 1
        for group, size in enumerate(sizes):
            self._ranks[group].grow(size)
        self._groups = BlockHeap(int(budget.num_groups))
        self._group_key = zeros_i64(int(budget.num_groups))
        self._next: i64 = -1

    # What is idle.

    def _count(self, slot: i64, change: i64) -> None:
        self.idle[slot] += change
        self.group_idle[self.budget.group[slot]] += change
        self.budget.mark_changed(slot)

    def put_around(self, policy: EvictionPolicy) -> None:
        super().put_around(policy)
        self.is_direct = False

    def num_idle_of(self, tenant: i64) -> i64:
        return self.idle[tenant]

    def knows(self, block: i64) -> bool:
        return self._is_inner[block] != 0

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        slot = self.budget.of_block[block]
        self._count(slot, 1)
        if self.is_direct:
            self._lists.append(2 * slot, block)
        else:
            self._is_inner[block] = 1
            self.policy.insert(block, key, depth)

    def remove(self, block: i64) -> None:
        self._count(self.budget.of_block[block], -1)
        if self._is_inner[block] != 0:
            self._is_inner[block] = 0
            self.policy.remove(block)
        else:
            self._lists.remove(block)
            if not self.is_direct:
                super().note_revived(block)

    def add_retained(self, block: i64) -> None:
        """Add an idle block that is retained: it is evicted when its tenant has no other."""
        slot = self.budget.of_block[block]
        self._count(slot, 1)
        self._lists.append(2 * slot + 1, block)

    def remove_retained(self, block: i64) -> None:
        """Remove an idle block that was retained."""
        self._count(self.budget.of_block[block], -1)
        self._lists.remove(block)

    # Who gives.

    def find_requester(self) -> bool:
        """Skip requesters that get no victim, because all idle blocks are within the guarantees of other tenants."""
        self._rank()
        while self.budget.requester() >= 0:
            if self._chosen_tenant() >= 0:
                return True
            if not self.budget.skip_requester():
                return False
        return False

    def choose(self) -> i64:
        """Return the tenant that gives the next block. At least one block must be idle."""
        self._rank()
        slot = self._chosen_tenant()
        if slot < 0:
            slot = self._first_of(self._groups.first())
        return slot

    def _chosen_tenant(self) -> i64:
        """Return the tenant that gives; -1 if none is above its guarantee and the requester has no idle block."""
        if self._groups.num_items == 0:
            return -1
        group = self._groups.first()
        if self._group_key[group] > 0:
            return self._first_of(group)
        asks = self.budget.requester()
        if asks < 0:
            return -1
        group = self.budget.group[asks]
        if self._ranks[int(group)].num_items > 0 and self._excess(self._first_of(group)) > 0:
            return self._first_of(group)
        return asks if self.idle[asks] > 0 else -1

    def _first_of(self, group: i64) -> i64:
        return self._first[group] + self._ranks[int(group)].first()

    def _excess(self, slot: i64) -> i64:
        budget = self.budget
        blocks = budget.held[slot] + budget.chosen_for[slot] + self.idle[slot] - budget.guarantee[slot]
        excess = blocks * SCALE // budget.weight[slot]
        return excess + BORROWED if self.idle[slot] > budget.max_idle[slot] else excess

    def _rank(self) -> None:
        """Rank the tenants that have changed. O(log tenants) for each."""
        budget = self.budget
        for index in range(budget.num_changed):
            slot = budget.changed[index]
            group = budget.group[slot]
            ranks = self._ranks[int(group)]
            place = self._place[slot]
            if ranks.holds(place):
                ranks.remove(place)
            if self.idle[slot] > 0:
                ranks.insert(place, place - self._excess(slot) * TIES)
        for index in range(budget.num_changed):
            self._rank_group(budget.group[budget.changed[index]])
        budget.clear_changed()

    def _rank_group(self, group: i64) -> None:
        if self._groups.holds(group):
            self._groups.remove(group)
        if self.group_idle[group] == 0:
            return
        key = self._key_of(group)
        self._group_key[group] = key
        self._groups.insert(group, group - key * TIES)

    def _key_of(self, group: i64) -> i64:
        """Return a group's excess; at most 0 if no member is above its own guarantee."""
        budget = self.budget
        first = self._excess(self._first_of(group))
        blocks = budget.group_held[group] + budget.group_chosen_for[group] + self.group_idle[group]
        key = (blocks - budget.group_guarantee[group]) * SCALE // budget.group_weight[group]
        if first >= BORROWED // 2:
            return key + BORROWED
        return min(key, 0) if first <= 0 else key

    def evict(self) -> i64:
        """Return the first block of the tenant that gives, in the policy's order."""
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
        self.budget.note_choice()
        return block

    def _named(self, slot: i64) -> i64:
        """Ask the policy until it names a block of this tenant; the policy must know one."""
        while True:
            block = self.policy.evict()
            if not 0 < block < len(self._is_inner) or self._is_inner[block] == 0:
                if 0 < block < len(self._is_inner):
                    raise ValueError(f"block {block} was chosen before, or is not idle")
                return block
            self._is_inner[block] = 0
            owner = self.budget.of_block[block]
            if owner == slot:
                return block
            self._lists.append(2 * owner, block)

    def has_plain(self, slot: i64) -> bool:
        """Return whether the tenant has an idle block that is not retained; the next `evict` then returns one."""
        if self.idle[slot] == self._lists.length[2 * slot + 1]:
            return False
        self._next = slot
        return True

    def retained_blocks(self, slot: i64) -> list[int]:
        """Return the tenant's idle blocks that are retained. O(their number)."""
        return self._lists.blocks(2 * slot + 1)

    # The size, and checks.

    def clear(self) -> None:
        self._lists.clear()
        clear_i32(self._is_inner)
        clear_i64(self.idle)
        clear_i64(self.group_idle)
        for slot in range(self.budget.num_tenants):
            self.budget.mark_changed(slot)
        super().clear()

    def grow(self, num_blocks: int) -> None:
        """Grow, also if the policy raises; after a MemoryError nothing has grown."""
        is_inner = grown_i32(self._is_inner, num_blocks)
        self.budget.grow(num_blocks)
        self._lists.grow(num_blocks)
        failure = self.grow_policy(num_blocks)
        super().grow(num_blocks)
        self._is_inner = is_inner
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Verify counts, ranks and lists, and the policy. O(num_blocks). Raises `InvariantError`."""
        self.budget.check()
        self._lists.check()
        idle = [0] * int(self.budget.num_tenants)
        for block in range(len(self._is_inner)):
            listed = self._lists.list_of(i64(block))
            if listed >= 0 and (self._is_inner[i64(block)] != 0 or listed >> 1 != self.budget.of_block[i64(block)]):
                raise InvariantError(
                    f"tenants: block {block} is in list {listed}, but the policy knows it or it is another tenant's"
                )
            if listed >= 0 or self._is_inner[i64(block)] != 0:
                idle[self.budget.of_block[i64(block)]] += 1
        if idle != list(self.idle):
            raise InvariantError(f"tenants: tenants have {idle} idle blocks, but the counts are {list(self.idle)}")
        self._check_ranks()
        self.policy.check()

    def _check_ranks(self) -> None:
        """Verify that members and groups are ranked by their excess. O(tenants)."""
        self._rank()
        members: dict[int, tuple[int, int]] = {}
        for slot in range(int(self.budget.num_tenants)):
            if self.idle[i64(slot)] > 0:
                group, rank = int(self.budget.group[i64(slot)]), (-int(self._excess(i64(slot))), slot)
                members[group] = min(members.get(group, rank), rank)
        firsts = {group: int(self._first_of(i64(group))) for group in members}
        if firsts != {group: slot for group, (_, slot) in members.items()}:
            raise InvariantError(f"tenants: {firsts} are ranked first in their groups; by excess it must be {members}")
        groups = sorted((-int(self._key_of(i64(group))), group) for group in members)
        if int(self._groups.num_items) != len(groups) or (groups and self._groups.first() != groups[0][1]):
            raise InvariantError(f"tenants: the ranking of groups differs from their order by excess, {groups}")
