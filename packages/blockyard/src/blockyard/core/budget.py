"""The blocks of a pool that each tenant holds and may take."""

from collections.abc import Sequence
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ..errors import InvariantError
from ..tenants import OTHERS, Roster, TenantGroup
from .arrays import grown_i32, grown_i64, zeros_i32, zeros_i64

#: Stands for a limit that is not set.
NO_LIMIT: Final[i64] = 1099511627776


class Budget:
    """The budget of a pool that is not shared: its one tenant, number 0, may take every free block.

    Calls ask the budget for room before they take blocks, say for whom they take them (`act_for`), and announce what
    several tenants are about to take (`expect`), so that a policy can choose all victims before the first change.
    """

    def __init__(self) -> None:
        #: Whether tenants share the pool.
        self.is_shared = False
        #: The tenants' names, and the blocks that each one holds; a pool that is not shared counts none.
        self.names = [OTHERS]
        self.held = zeros_i64(0)

    def tenant_of(self, keys: tuple[object, ...]) -> i64:  # noqa: ARG002
        """Return the number of the tenant whose prompts have these plain keys. O(keys)."""
        return 0

    def tenant_of_row(self, row: i64) -> i64:  # noqa: ARG002
        """Return the tenant of the sequence in `row`."""
        return 0

    def assign_row(self, row: i64, tenant: i64) -> None:
        """Make the sequence in `row` this tenant's."""

    # What may be taken.

    def room(self, tenant: i64, free: i64, watermark: i64 = 0) -> i64:  # noqa: ARG002
        """Return how many of `free` blocks the tenant may take now.

        watermark: free blocks to leave besides; it does not count for blocks within the tenant's guarantee.
        """
        return free - watermark

    def max_blocks(self, tenant: i64, usable: i64, watermark: i64) -> i64:  # noqa: ARG002
        """Return how many of `usable` blocks limits and others' guarantees let the tenant hold; `NO_LIMIT` for all."""
        return NO_LIMIT

    def limits(self, tenant: i64, free: i64) -> str:  # noqa: ARG002
        """Describe for an error what keeps the tenant from taking more."""
        return f"{free} are free"

    # What is planned, before the first change.

    def plan(self, row: i64, count: i64) -> None:
        """Count `count` blocks as taken by the sequence in `row`, until `undo_plans`."""

    def undo_plans(self, rows: vec[i64]) -> None:
        """Undo `plan` for these rows. O(rows)."""

    def shortage(self, rows: vec[i64], needed: vec[i64], free: i64) -> str:
        """Describe for an error why a row has no room for its needed blocks, after the rows before it; "" if all have.

        Args:
            rows: rows of sequences.
            needed: blocks that each of them needs.
            free: free blocks.
        """
        try:
            for index in range(i64(len(rows))):
                tenant = self.tenant_of_row(rows[index])
                if needed[index] > self.room(tenant, free):
                    return f"seqs need {needed[index]} blocks; {self.limits(tenant, free)}"
                free -= needed[index]
                self.plan(rows[index], needed[index])
        finally:
            self.undo_plans(rows)
        return ""

    # Who takes blocks.

    def act_for(self, tenant: i64) -> None:
        """Charge blocks that are taken from now on to this tenant, and choose victims for it."""

    def act_for_row(self, row: i64, free: i64) -> i64:  # noqa: ARG002
        """Act for the tenant of a row; return how many of `free` blocks it may take now."""
        return free

    def expect(self, tenant: i64, count: i64) -> None:
        """Choose the next `count` victims, after those of earlier calls since `expect_none`, for this tenant."""

    def expect_none(self) -> None:
        """Choose victims for the tenant that acts, until the next `expect`."""

    def begin_choice(self, num_covered: i64) -> None:
        """Begin to choose victims; the first `num_covered` expected blocks are free already and need none."""


class SharedBudget(Budget):
    """The budget of a pool that tenants share. All operations are O(1) unless they say otherwise.

    A block is charged to one tenant, whose sequence took it, until the block is free again or another tenant takes it.
    A tenant's *shortfall* is the part of its guarantee that it does not hold, `max(0, min_blocks - held)`. A group's
    shortfall is that of the group's guarantee, or the sum of its members' if that is more. A tenant may take free
    blocks only beyond the shortfalls of all others, so the free blocks, idle ones included, are never fewer than all
    shortfalls together.
    """

    def __init__(self, groups: Sequence[TenantGroup], num_blocks: int, max_num_seqs: int) -> None:
        super().__init__()
        members = [(member, number) for number, group in enumerate(groups) for member in group.members]
        self.is_shared = True
        self.roster = Roster(groups)
        self.names = self.roster.names
        self.num_tenants: i64 = len(members)
        self.num_groups: i64 = len(groups)
        self.group = _numbers([number for _, number in members])
        self.weight = _numbers([member.weight for member, _ in members])
        self.guarantee = _numbers([member.min_blocks for member, _ in members])
        self.max_held = _numbers([_limit(member.max_held) for member, _ in members])
        self.max_idle = _numbers([_limit(member.max_idle) for member, _ in members])
        self.max_retained = _numbers([_limit(member.max_retained) for member, _ in members])
        self.group_weight = _numbers([group.weight for group in groups])
        self.group_guarantee = _numbers([group.guarantee for group in groups])
        self.group_max = _numbers([_limit(group.max_held) for group in groups])
        self.held = zeros_i64(len(members))
        self.group_held = zeros_i64(len(groups))
        #: Cached blocks of each tenant that were evicted so far.
        self.num_evicted = zeros_i64(len(members))
        #: The sum of the members' shortfalls, by group, and the sum of all groups' shortfalls.
        self.member_shortfall = _numbers([sum(member.min_blocks for member in group.members) for group in groups])
        self.shortfall: i64 = sum(group.guarantee for group in groups)
        #: The tenant of each block and of each row of the sequences, and whether a block is held.
        self.of_block = zeros_i64(num_blocks)
        self.is_held = zeros_i32(num_blocks)
        self._of_row = zeros_i64(max_num_seqs)
        self._planned = zeros_i64(max_num_seqs)
        #: The tenant that blocks are charged to now.
        self.acting: i64 = 0
        # Tenants and the blocks that each one takes next. Those from `_first_expected` to `_num_expected` are still to
        # be chosen for; -1 expected: all victims are for the tenant that acts.
        self._expected_tenant = zeros_i64(2 * max_num_seqs)
        self._expected_count = zeros_i64(2 * max_num_seqs)
        self._first_expected: i64 = 0
        self._num_expected: i64 = -1
        #: Blocks for which victims were chosen and that are not taken yet, by tenant and by group.
        self.chosen_for = zeros_i64(len(members))
        self.group_chosen_for = zeros_i64(len(groups))
        self._chosen_tenants = zeros_i64(len(members))
        self._num_chosen_tenants: i64 = 0
        self._is_chosen = zeros_i32(len(members))
        #: Tenants whose numbers have changed since they were ranked.
        self.changed = zeros_i64(len(members))
        self.num_changed: i64 = 0
        self._has_changed = zeros_i32(len(members))

    def tenant_of(self, keys: tuple[object, ...]) -> i64:
        return self.roster.number_of(keys)

    def tenant_of_row(self, row: i64) -> i64:
        return self._of_row[row]

    def assign_row(self, row: i64, tenant: i64) -> None:
        self._of_row[row] = tenant

    # What is held.

    def hold(self, tenant: i64, count: i64) -> None:
        """Charge `count` more blocks to the tenant; below 0, fewer."""
        group = self.group[tenant]
        before = max(self.guarantee[tenant] - self.held[tenant], 0)
        group_before = self._group_shortfall(group)
        self.held[tenant] += count
        self.group_held[group] += count
        self.member_shortfall[group] += max(self.guarantee[tenant] - self.held[tenant], 0) - before
        self.shortfall += self._group_shortfall(group) - group_before
        self.mark_changed(tenant)

    def _group_shortfall(self, group: i64) -> i64:
        return max(self.group_guarantee[group] - self.group_held[group], self.member_shortfall[group])

    def mark_changed(self, tenant: i64) -> None:
        """Have the tenant ranked anew."""
        if self._has_changed[tenant] == 0:
            self._has_changed[tenant] = 1
            self.changed[self.num_changed] = tenant
            self.num_changed += 1

    def clear_changed(self) -> None:
        """Note that all tenants that changed are ranked. O(these)."""
        for index in range(self.num_changed):
            self._has_changed[self.changed[index]] = 0
        self.num_changed = 0

    # What may be taken.

    def room(self, tenant: i64, free: i64, watermark: i64 = 0) -> i64:
        group = self.group[tenant]
        shortfall = max(self.guarantee[tenant] - self.held[tenant], 0)
        others_in_group = self.member_shortfall[group] - shortfall
        room = free - (self.shortfall - self._group_shortfall(group)) - others_in_group
        guaranteed = max(shortfall, self.group_guarantee[group] - self.group_held[group] - others_in_group)
        room = max(room - watermark, min(guaranteed, room))
        room = min(room, self.max_held[tenant] - self.held[tenant])
        return min(room, self.group_max[group] - self.group_held[group] - others_in_group)

    def max_blocks(self, tenant: i64, usable: i64, watermark: i64) -> i64:
        return self.roster.max_blocks(int(tenant), int(usable), int(watermark))

    def limits(self, tenant: i64, free: i64) -> str:
        group = self.group[tenant]
        text = f"tenant {self.names[int(tenant)]!r} holds {self.held[tenant]} blocks"
        if self.max_held[tenant] < NO_LIMIT:
            text += f" of at most {self.max_held[tenant]}"
        if self.group_max[group] < NO_LIMIT:
            text += f", its group {self.group_held[group]} of at most {self.group_max[group]}"
        reserved = self.shortfall - self._group_shortfall(group) + self.member_shortfall[group]
        reserved -= max(self.guarantee[tenant] - self.held[tenant], 0)
        return f"{text}; {free} are free, of which {reserved} are reserved for the guarantees of others"

    # What is planned.

    def plan(self, row: i64, count: i64) -> None:
        self._planned[row] += count
        self.hold(self._of_row[row], count)

    def undo_plans(self, rows: vec[i64]) -> None:
        for index in range(i64(len(rows))):
            row = rows[index]
            self.hold(self._of_row[row], -self._planned[row])
            self._planned[row] = 0

    # The tenants for whom victims are chosen.

    def act_for(self, tenant: i64) -> None:
        self.acting = tenant
        self.expect_none()

    def act_for_row(self, row: i64, free: i64) -> i64:
        tenant = self._of_row[row]
        self.act_for(tenant)
        return self.room(tenant, free)

    def expect(self, tenant: i64, count: i64) -> None:
        self._num_expected = max(self._num_expected, 0)
        if count > 0:
            self._expected_tenant[self._num_expected] = tenant
            self._expected_count[self._num_expected] = count
            self._num_expected += 1

    def expect_none(self) -> None:
        self._first_expected = 0
        self._num_expected = -1

    def begin_choice(self, num_covered: i64) -> None:
        for index in range(self._num_chosen_tenants):
            tenant = self._chosen_tenants[index]
            self._is_chosen[tenant] = 0
            self._change_chosen(tenant, -self.chosen_for[tenant])
        self._num_chosen_tenants = 0
        while num_covered > 0 and self._first_expected < self._num_expected:
            part = min(num_covered, self._expected_count[self._first_expected])
            num_covered -= part
            self._add_chosen(self._expected_tenant[self._first_expected], part)
            self._use_expected(part)

    def _use_expected(self, count: i64) -> None:
        self._expected_count[self._first_expected] -= count
        if self._expected_count[self._first_expected] == 0:
            self._first_expected += 1

    def requester(self) -> i64:
        """Return the tenant that the next victim is for; -1 after the last expected one."""
        if self._num_expected < 0:
            return self.acting
        return self._expected_tenant[self._first_expected] if self._first_expected < self._num_expected else -1

    def skip_requester(self) -> bool:
        """Give the requester no victim. Return whether another requester follows."""
        self._first_expected += 1
        return 0 <= self._first_expected < self._num_expected

    def note_choice(self) -> None:
        """Count a victim as chosen for the requester."""
        tenant = self.requester()
        if tenant < 0:
            return
        self._add_chosen(tenant, 1)
        if self._num_expected >= 0:
            self._use_expected(1)

    def _add_chosen(self, tenant: i64, count: i64) -> None:
        if self._is_chosen[tenant] == 0:
            self._is_chosen[tenant] = 1
            self._chosen_tenants[self._num_chosen_tenants] = tenant
            self._num_chosen_tenants += 1
        self._change_chosen(tenant, count)

    def take_chosen(self, tenant: i64, count: i64) -> None:
        """Take `count` blocks for the tenant, first of those that were chosen for it."""
        self._change_chosen(tenant, -min(self.chosen_for[tenant], count))

    def _change_chosen(self, tenant: i64, count: i64) -> None:
        if count != 0:
            self.chosen_for[tenant] += count
            self.group_chosen_for[self.group[tenant]] += count
            self.mark_changed(tenant)

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. MemoryError changes nothing."""
        of_block = grown_i64(self.of_block, num_blocks)
        is_held = grown_i32(self.is_held, num_blocks)
        self.of_block = of_block
        self.is_held = is_held

    def check(self) -> None:
        """Raise `InvariantError` unless the sums agree with the blocks held. O(num_blocks + tenants)."""
        held = [0] * int(self.num_tenants)
        for block in range(len(self.is_held)):
            if self.is_held[i64(block)] != 0:
                held[self.of_block[i64(block)]] += 1
        if held != list(self.held):
            raise InvariantError(f"budget: tenants hold {held} blocks, the counts say {list(self.held)}")
        group_held = [0] * int(self.num_groups)
        shortfalls = [0] * int(self.num_groups)
        for tenant in range(self.num_tenants):
            group_held[int(self.group[tenant])] += int(self.held[tenant])
            shortfalls[int(self.group[tenant])] += max(int(self.guarantee[tenant] - self.held[tenant]), 0)
        if group_held != list(self.group_held) or shortfalls != list(self.member_shortfall):
            raise InvariantError(
                f"budget: groups hold {group_held} blocks and lack {shortfalls}, the counts say "
                f"{list(self.group_held)} and {list(self.member_shortfall)}"
            )
        chosen = list(self._chosen_tenants)[: int(self._num_chosen_tenants)]
        for tenant in range(self.num_tenants):
            is_listed = self.chosen_for[tenant] >= 0 and (self.chosen_for[tenant] == 0 or tenant in chosen)
            if not is_listed or (self._is_chosen[tenant] != 0) != (tenant in chosen):
                raise InvariantError(
                    f"budget: {self.chosen_for[tenant]} blocks are chosen for tenant {tenant}, listed are {chosen}"
                )
        planned = [row for row in range(len(self._planned)) if self._planned[i64(row)] != 0]
        if planned:
            raise InvariantError(f"budget: plans for rows {planned} were not undone")
        total = sum(int(self._group_shortfall(group)) for group in range(self.num_groups))
        if total != self.shortfall:
            raise InvariantError(f"budget: groups lack {total} blocks together, the count says {self.shortfall}")


def _limit(value: int | None) -> int:
    return int(NO_LIMIT) if value is None else value


def _numbers(values: list[int]) -> vec[i64]:
    numbers = zeros_i64(len(values))
    for index, value in enumerate(values):
        numbers[index] = value
    return numbers
