"""Deferred free: blocks released by sequences while a step in flight may still write or read them."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NULL_BLOCK
from ..arrays import grown_i32, grown_i64, power_of_two, zeros_i32, zeros_i64


class FenceRoom:
    """Larger arrays for a fence, not installed yet."""

    def __init__(self, until: vec[i64], next_block: vec[i32]) -> None:
        self.until = until
        self.next_block = next_block


class Fence:
    """Deferred free for a pool with one step at a time: no step is in flight, so every block is released at once.

    Also the interface of `StepFence`.
    """

    def __init__(self) -> None:
        #: Blocks that wait.
        self.num_blocks: i64 = 0
        #: The latest step that has ended; 0 if steps have no numbers.
        self.num_ended: i64 = 0

    def is_open(self, row: i64) -> bool:  # noqa: ARG002
        """Return whether a step of the sequence in `row` is in flight."""
        return False

    def last_step_of(self, row: i64) -> i64:  # noqa: ARG002
        """Return the latest step that this row was in; 0 for none."""
        return 0

    def forget_row(self, row: i64) -> None:
        """Forget the steps of a row whose sequence is closed."""

    def step_of(self, block: i64) -> i64:  # noqa: ARG002
        """Return the step that a block waits for; 0 for none."""
        return 0

    def hold(self, block: i64, step: i64) -> bool:  # noqa: ARG002
        """Defer the free of a block until `step` has ended. Return False if it is deferred already.

        It then waits for the later of the two steps.
        """
        return False

    def take(self, out: vec[i32], step: i64) -> i64:  # noqa: ARG002
        """Write blocks that wait for steps up to `step` to the end of `out`, in reverse. Return their number.

        Call it until it returns 0; the steps have ended then.
        """
        return 0

    def block_ids(self) -> list[int]:
        """Return the waiting blocks by step, within a step in the order of their release. O(blocks)."""
        return []

    def make_room_for(self, num_blocks: int) -> FenceRoom:  # noqa: ARG002
        """Return copies of the arrays, enlarged for a pool of `num_blocks` blocks."""
        return FenceRoom(zeros_i64(0), zeros_i32(0))

    def move_into(self, room: FenceRoom) -> None:
        """Install larger arrays."""


class StepFence(Fence):
    """Defers the free of a released block until the last step with one of its sequences has ended.

    Steps are numbered from 1 as they begin, and end in the same order. At most `max_steps` are in flight: `num_ended` +
    1 to `num_begun`.

    The blocks that wait for a step are a list in the order of their release, linked through `next_block`. A block that
    is released again for a later step stays in its list, and moves to the later one when the list is taken. So nothing
    here allocates memory, and each release of a block costs O(1).

    Attributes:
        last_step: by row, its latest step.
        until: by block, the step that it waits for; 0 for none.
    """

    def __init__(self, max_num_seqs: int, max_steps: int, num_blocks: int) -> None:
        super().__init__()
        self.max_steps: i64 = max_steps
        size = power_of_two(max_steps)
        self._mask: i64 = size - 1
        self.num_begun: i64 = 0
        self.last_step = zeros_i64(max_num_seqs)
        self.until = zeros_i64(num_blocks)
        self.next_block = zeros_i32(num_blocks)
        self._first = zeros_i64(size)
        self._last = zeros_i64(size)

    def num_in_flight(self) -> i64:
        """Return the number of steps that began and have not ended."""
        return self.num_begun - self.num_ended

    def last_step_of(self, row: i64) -> i64:
        return self.last_step[row]

    def forget_row(self, row: i64) -> None:
        self.last_step[row] = 0

    def step_of(self, block: i64) -> i64:
        return self.until[block]

    def is_open(self, row: i64) -> bool:
        return self.last_step[row] > self.num_ended

    def hold(self, block: i64, step: i64) -> bool:
        waits_for = self.until[block]
        if waits_for < step:
            self.until[block] = step
        if waits_for > 0:
            return False
        self.num_blocks += 1
        self._put(block, step)
        return True

    def _put(self, block: i64, step: i64) -> None:
        place = step & self._mask
        self.next_block[block] = i32(NULL_BLOCK)
        if self._first[place] == NULL_BLOCK:
            self._first[place] = block
        else:
            self.next_block[self._last[place]] = i32(block)
        self._last[place] = block

    def take(self, out: vec[i32], step: i64) -> i64:
        taken: i64 = 0
        room = i64(len(out))
        while self.num_ended < step:
            place = self.num_ended + 1 & self._mask
            block = self._first[place]
            while block != NULL_BLOCK:
                if taken == room:
                    return taken
                self._first[place] = i64(self.next_block[block])
                if self.until[block] > step:
                    self._put(block, self.until[block])
                else:
                    self.until[block] = 0
                    self.num_blocks -= 1
                    taken += 1
                    out[room - taken] = i32(block)
                block = self._first[place]
            self.num_ended += 1
        return taken

    def block_ids(self) -> list[int]:
        blocks: list[int] = []
        for step in range(self.num_ended + 1, self.num_begun + 1):
            block = self._first[step & self._mask]
            while block != NULL_BLOCK:
                blocks.append(int(block))
                block = i64(self.next_block[block])
        return blocks

    # The size.

    def make_room_for(self, num_blocks: int) -> FenceRoom:
        return FenceRoom(grown_i64(self.until, num_blocks), grown_i32(self.next_block, num_blocks))

    def move_into(self, room: FenceRoom) -> None:
        self.until = room.until
        self.next_block = room.next_block
