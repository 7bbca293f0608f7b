"""Plans out of bytes, on a rank that carries them out."""

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import require_int, require_str, shown
from ...config import MAX_BLOCKS, MAX_MODEL_LEN
from ...errors import DivergedRank, InvalidArgument
from ..arrays import zeros_i64
from ..gate import Gate
from ..refusing import refuse_copy, refuse_pickle
from ..sequences.block_table import BlockTable
from ..store.transfers import Transfers
from ..tokens import MAX_TOKEN
from .batch import WAITS_FOR_PREFIX, Batch
from .message import COUNTS, GROUP_WORDS, HEADER_BYTES, MOVE_WORDS, NO_DIGEST, ROW_WORDS, STEP, Header, Shape
from .mirror import TableMirror
from .step_plan import StepPlan
from .step_tokens import GivenTokens
from .swap_plan import SwapPlan


class PlanReceiver:
    """The other end of a chain of plans: reads what one `PlanSender` makes, on each rank that has blocks of its own.

    It keeps a copy of the block tables, to which a message brings what has changed; equal messages make equal plans. A
    message is checked as a whole before any of it is taken in: after an error the rank is where it was.

    config: the `CacheConfig` of the sender's cache. name: what errors call this rank.
    """

    def __init__(self, config: object, name: object = "this rank") -> None:
        self._shape = Shape(config)
        self._name = require_str("name", name)
        shape = self._shape
        self._mirrors = [
            TableMirror(shape.max_num_seqs, width, size)
            for width, size in zip(shape.widths, shape.block_sizes, strict=True)
        ]
        self._tables: list[BlockTable] = [mirror.table for mirror in self._mirrors]
        self._num_blocks: i64 = shape.num_blocks
        self._mark = zeros_i64(shape.max_num_seqs)
        self._last_mark: i64 = 0
        self._gate = Gate()
        self._num_steps = 0
        self._digest = NO_DIGEST

    @property
    def num_steps(self) -> int:
        """Messages read so far. O(1)."""
        return self._num_steps

    @property
    def digest(self) -> str:
        """The digest of all messages read so far, equal to the sender's after the same ones. O(1)."""
        return self._digest.hex()

    def resize(self, num_blocks: object) -> None:
        """The rank's KV tensors have this many blocks now, as the sender's pool has; no plan may name others. O(1)."""
        self._num_blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)

    def from_bytes(self, data: object) -> SwapPlan:
        """Read the next message: bytes, or anything with a buffer of them; it is not held. O(bytes).

        Returns what was sent, a `StepPlan` or a `SwapPlan`; a step plan is stale once the next one is read.
        Raises `DivergedRank` unless it continues what this rank has read, and `InvalidArgument` for bytes that are no
        message, or one of another shape of cache, or that name a row, block or slot outside it; `ConcurrentCall`.
        """
        message = _bytes_of(data)
        self._gate.enter("from_bytes")
        try:
            return self._read(message)
        finally:
            self._gate.leave()

    def _read(self, message: bytes) -> SwapPlan:
        header = Header(message)
        if header.step != self._num_steps + 1 or header.before != self._digest:
            raise DivergedRank(
                f"{self._name} is at step {self._num_steps} with digest {self.digest}; the plan is step {header.step} "
                f"and continues step {header.step - 1} with digest {header.before.hex()}"
            )
        words = vec[i64](np.frombuffer(message, dtype=np.dtype("<i4"), offset=HEADER_BYTES).astype(np.int64))
        if header.kind == STEP:
            plan: SwapPlan = self._step_plan(words)
        else:
            plan = self._swap_plan(words)
        self._num_steps = header.step
        self._digest = header.digest
        return plan

    def _swap_plan(self, words: vec[i64]) -> SwapPlan:
        moves = self._count_moves(words, 0)
        require_length(words, COUNTS + MOVE_WORDS * moves)
        if words[2] != 0 or words[3] != 0 or words[4] != 0 or words[7] != 0:
            raise InvalidArgument("data is a swap plan with sequences or copies; it has neither")
        return SwapPlan(self._tables, self._read_moves(words, COUNTS))

    def _step_plan(self, words: vec[i64]) -> StepPlan:
        """Check all, then take it in."""
        num_groups = len(self._mirrors)
        moves = self._count_moves(words, num_groups)
        first_move = COUNTS + GROUP_WORDS * num_groups
        first = first_move + MOVE_WORDS * moves
        changes = self._length_of_changes(words)
        num_seqs = words[2]
        num_tokens = words[3]
        num_unserved = words[4]
        require_length(words, first + 3 * num_seqs + 2 * num_unserved + num_tokens + changes)
        transfers = self._read_moves(words, first_move)
        batch = self._read_batch(words, first, num_seqs, num_tokens, num_unserved)
        first += 3 * num_seqs + 2 * num_unserved + num_tokens
        for group in range(num_groups):
            mirror = self._mirrors[group]
            at = COUNTS + GROUP_WORDS * i64(group)
            mirror.check(words, first, words[at + 2], words[at + 3], batch, self._num_blocks)
            first += ROW_WORDS * words[at + 2] + words[at + 3]
        plan = StepPlan(self._tables, batch, zeros_i64(0), transfers)
        self._tables[0].version += 1
        batch.version = self._tables[0].version
        for mirror in self._mirrors:
            mirror.take_in(words, batch.rows)
        return plan

    def _count_moves(self, words: vec[i64], num_groups: i64) -> i64:
        """How many moves there are, of a body whose counts are sound."""
        if i64(len(words)) < COUNTS + GROUP_WORDS * num_groups:
            raise InvalidArgument(f"data has {len(words)} words; a plan of {num_groups} groups has more")
        if words[0] != num_groups or words[1] != self._shape.max_num_seqs:
            raise InvalidArgument(
                f"data is a plan of {words[0]} groups and {words[1]} sequences at once; "
                f"{self._name} has {num_groups} and {self._shape.max_num_seqs}"
            )
        for index in range(2, COUNTS):
            if words[index] < 0 or words[index] > len(words):
                raise InvalidArgument(f"data has {words[index]} at word {index}; its body has {len(words)} words")
        return words[5] + words[6] + words[7]

    def _length_of_changes(self, words: vec[i64]) -> i64:
        """The words of all changed rows, of groups that are this rank's."""
        length: i64 = 0
        for group in range(i64(len(self._mirrors))):
            at = COUNTS + GROUP_WORDS * group
            table = self._tables[group]
            if words[at] != table.block_size or words[at + 1] != table.width:
                raise InvalidArgument(
                    f"data has block size {words[at]} and {words[at + 1]} blocks a sequence in group {group}; "
                    f"{self._name} has {table.block_size} and {table.width}"
                )
            for index in range(at + 2, at + 4):
                if words[index] < 0 or words[index] > len(words):
                    raise InvalidArgument(f"data has {words[index]} at word {index}; its body has {len(words)} words")
            length += ROW_WORDS * words[at + 2] + words[at + 3]
        return length

    def _read_moves(self, words: vec[i64], first: i64) -> Transfers:
        num_cpu: i64 = self._shape.num_cpu_blocks
        transfers = Transfers()
        outs = first + MOVE_WORDS * words[5]
        ins = outs + MOVE_WORDS * words[6]
        transfers.swap_outs = self._moves("swap_outs", words, first, outs, self._num_blocks, num_cpu)
        transfers.swap_ins = self._moves("swap_ins", words, outs, ins, num_cpu, self._num_blocks)
        end = ins + MOVE_WORDS * words[7]
        transfers.copies = self._moves("copies", words, ins, end, self._num_blocks, self._num_blocks)
        return transfers

    def _moves(self, name: str, words: vec[i64], first: i64, end: i64, num_from: i64, num_to: i64) -> list[int]:
        moves: list[int] = []
        for at in range(first, end, MOVE_WORDS):
            source = words[at]
            target = words[at + 1]
            group = words[at + 2]
            if num_from <= 0 or num_to <= 0:
                raise InvalidArgument(f"data has {name}; the config of this receiver has no CPU pool")
            if not (0 < source < num_from and 0 < target < num_to and 0 <= group < len(self._mirrors)):
                raise InvalidArgument(
                    f"data has ({source}, {target}) of group {group} in {name}; blocks are from 1 to {num_from - 1} "
                    f"and 1 to {num_to - 1}, groups from 0 to {len(self._mirrors) - 1}"
                )
            moves += (int(source), int(target), int(group))
        return moves

    def _read_batch(self, words: vec[i64], first: i64, num_seqs: i64, num_tokens: i64, num_unserved: i64) -> Batch:
        rows = words[int(first) : int(first + num_seqs)]
        starts = words[int(first + num_seqs) : int(first + 2 * num_seqs)]
        scheduled = words[int(first + 2 * num_seqs) : int(first + 3 * num_seqs)]
        self._check_batch(rows, starts, scheduled, num_tokens)
        first += 3 * num_seqs
        statuses = zeros_i64(int(num_seqs))
        for at in range(first, first + 2 * num_unserved, 2):
            place = words[at]
            if not (0 <= place < num_seqs and 0 < words[at + 1] <= WAITS_FOR_PREFIX and scheduled[place] == 0):
                raise InvalidArgument(f"data has status {words[at + 1]} for sequence {place} of {num_seqs}")
            statuses[place] = words[at + 1]
        first += 2 * num_unserved
        ids = words[int(first) : int(first + num_tokens)]
        for token in ids:
            if token < -1 or token > MAX_TOKEN:
                raise InvalidArgument(f"data has token {token}; a token is from 0 to {MAX_TOKEN}, -1 is not known")
        return Batch(self._tables[0], GivenTokens(ids), rows, starts, scheduled, statuses)

    def _check_batch(self, rows: vec[i64], starts: vec[i64], scheduled: vec[i64], num_tokens: i64) -> None:
        limit: i64 = self._shape.max_num_seqs
        longest: i64 = MAX_MODEL_LEN
        self._last_mark += 1
        total: i64 = 0
        for index in range(i64(len(rows))):
            row = rows[index]
            if row < 0 or row >= limit or self._mark[row] == self._last_mark:
                raise InvalidArgument(f"data has row {row} for sequence {index}; rows are from 0 to {limit - 1}, once")
            self._mark[row] = self._last_mark
            if starts[index] < 0 or scheduled[index] < 0 or starts[index] + scheduled[index] > longest:
                raise InvalidArgument(
                    f"data has {scheduled[index]} tokens from {starts[index]} for sequence {index}; "
                    f"the limit is {longest} tokens"
                )
            total += scheduled[index]
        if total != num_tokens:
            raise InvalidArgument(f"data has {num_tokens} tokens; its sequences have {total}")

    def __copy__(self) -> "PlanReceiver":
        raise refuse_copy("a PlanReceiver", "make another one with another sender")

    def __deepcopy__(self, memo: object) -> "PlanReceiver":
        raise refuse_copy("a PlanReceiver", "make another one with another sender")

    def __reduce__(self) -> str:
        raise refuse_pickle("a PlanReceiver", "make one in the other process")


def require_length(words: vec[i64], length: i64) -> None:
    """Raise `InvalidArgument` unless a body has as many words as its counts say."""
    if i64(len(words)) != length:
        raise InvalidArgument(f"data has {len(words)} words in its body; its counts say {length}")


def _bytes_of(data: object) -> bytes:
    """A copy that no caller can change."""
    if isinstance(data, bytes):
        return data
    try:
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        refusal = InvalidArgument(f"data is {shown(data)}; bytes are needed")
        refusal.__cause__ = error
        raise refusal
