"""The manager: the two-phase life of sequences over one pool of blocks."""

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64

from ..answers import Admission, CacheStats
from ..arguments import require_int, require_str
from ..config import CacheConfig
from ..errors import InvalidArgument
from .admitting import Admitting
from .arrays import view_i32, view_i64, zeros_i64
from .block import KVCacheBlock
from .block_pool import BlockPool
from .block_table import BlockTable
from .branching import Branching
from .checking import check_mapping, check_sequences
from .committing import Committing
from .joining import Joining
from .mapping import Mapping, num_pages
from .plan import StepPlan, SwapPlan, whole_table
from .prompt import Prompt, make_prompt
from .reserving import NO_TOKEN, Reserving
from .sequences import SequenceTable
from .swapping import Swapping, require_cpu


class KVCacheManager:
    """Decides which block holds which token of which sequence; never touches a tensor.

    A sequence lives like this, and every call takes one handle or a whole batch of them:

        seq = cache.allocate(tokens)                 admission, prefix hit, blocks for the prompt
        plan = cache.reserve(seqs, num_new_tokens)   slots for the tokens about to be computed
        ...forward pass...
        cache.commit(seqs, num_computed, next_tokens)
        cache.free(seqs)

    A call either does all of its work or raises and changes nothing (I6). Not safe for use by several threads at once.

    >>> cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
    >>> first = cache.allocate([1, 2, 3, 4, 5, 6])
    >>> plan = cache.reserve([first], 6)
    >>> plan.slot_mapping.tolist()
    [4, 5, 6, 7, 8, 9]
    >>> cache.commit([first], 6, [7])
    >>> second = cache.allocate([1, 2, 3, 4, 9])
    >>> cache.num_computed_tokens(second)
    4
    >>> cache.free([first, second])
    >>> cache.num_used_blocks
    0
    """

    def __init__(self, config: object) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidArgument(f"config is {config!r}; it must be a CacheConfig")
        self.config = config
        size = config.hash_block_size
        pages = num_pages(config) if config.is_mapped else config.num_blocks
        self._pages = BlockPool(pages, size, config.enable_prefix_caching, config.hash_seed)
        self.block_size: i64 = size
        self._sequences = SequenceTable(config.max_num_seqs, config.max_blocks_per_seq, size)
        self._mapping = Mapping(config, self._pages, self._sequences) if config.is_mapped else None
        #: The pool of blocks that have keys and values.
        self.pool: BlockPool = self._pages if self._mapping is None else self._mapping.pool
        self._joining = Joining(self._sequences, self._pages.index, size)
        self._admitting = Admitting(config, self._pages, self._sequences, self._joining, self._mapping)
        self._reserving = Reserving(self._pages, self._sequences, self._joining, self._mapping, config.max_model_len)
        self._committing = Committing(self._pages, self._sequences, self._joining, self._mapping, config.max_model_len)
        self._branching = Branching(self._pages, self._sequences, self._joining, self._mapping)
        self._swapping = self._make_swapping()

    def _make_swapping(self) -> Swapping | None:
        if self._mapping is None or self._mapping.cpu is None:
            return None
        return Swapping(self._mapping, self._mapping.cpu, self._sequences)

    # Admission.

    def can_allocate(self, token_ids: object, extra_keys: object = (), num_seqs: object = 1) -> Admission:
        """Whether `allocate` would take this prompt: OK, LATER or NEVER. O(tokens). Changes nothing.

        The watermark counts as used, so that running sequences can grow without evicting one another.
        """
        count = require_int("num_seqs", num_seqs, 1, int(self._sequences.max_num_seqs))
        return self._admitting.answer([make_prompt(token_ids, extra_keys, int(self.block_size))], count)

    def allocate(self, token_ids: object, holder: object = "", extra_keys: object = (), num_seqs: object = 1) -> int:
        """Admit a prompt: hold the blocks of its longest cached prefix, and new ones for the rest. O(tokens).

        token_ids: integers (n,), as a list, an int32 or int64 array, a torch tensor, or anything with a buffer.
        holder: a name for errors and leak reports. extra_keys: see `blockyard.keys`.
        num_seqs: sequences that will come of this prompt (parallel sampling): their rows are set aside, so that
        `fork(seq, num_seqs - 1)` finds them, and admission counts the blocks they copy first.
        Returns the sequence's handle. `num_computed_tokens` then tells the hit: whole blocks, never the last token.
        Raises `NeverFits`, `OutOfBlocks` (ask `can_allocate` first), `OutOfRows` or `InvalidArgument`.
        """
        prompt = make_prompt(token_ids, extra_keys, int(self.block_size))
        name = require_str("holder", holder)
        count = require_int("num_seqs", num_seqs, 1, int(self._sequences.max_num_seqs))
        return self._admit([prompt], [name], count)[0]

    def can_allocate_batch(self, prompts: object, extra_keys: object = ()) -> Admission:
        """Whether `allocate_batch` would take these prompts together: OK, LATER or NEVER. O(tokens)."""
        return self._admitting.answer(self._make_prompts(prompts, extra_keys), 1)

    def allocate_batch(self, prompts: object, holders: object = (), extra_keys: object = ()) -> list[int]:
        """Admit several prompts, all or none. O(tokens).

        prompts: a list of what `allocate` takes. holders: as many names, or none. extra_keys: for all of them.
        What they begin with in common is taken once. Returns their handles. Raises as `allocate` does.
        """
        made = self._make_prompts(prompts, extra_keys)
        if holders == ():
            holders = [""] * len(made)
        if not isinstance(holders, (list, tuple)) or len(holders) != len(made):
            raise InvalidArgument(f"holders is {holders!r}; {len(made)} names are needed, one for each prompt")
        return self._admit(made, [require_str(f"holders[{i}]", name) for i, name in enumerate(holders)], 1)

    def _make_prompts(self, prompts: object, extra_keys: object) -> list[Prompt]:
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise InvalidArgument(f"prompts is {type(prompts).__name__}; a list of at least 1 prompt is needed")
        return [make_prompt(tokens, extra_keys, int(self.block_size)) for tokens in prompts]

    def _admit(self, prompts: list[Prompt], holders: list[str], num_seqs: int) -> list[int]:
        self._admitting.require(prompts, num_seqs)
        for prompt in prompts:
            self._admitting.prepare(prompt)
        rows = [self._admitting.admit(prompt, holders[i], num_seqs) for i, prompt in enumerate(prompts)]
        return [int(self._sequences.handle[row]) for row in rows]

    # The step.

    def reserve(self, seqs: object, num_new_tokens: object) -> StepPlan:
        """Slots for the next `num_new_tokens` tokens of each sequence, the whole batch at once. O(batch + new tokens).

        seqs: handles (B,); num_new_tokens: integers (B,), or one for all. It may go past the known tokens
        (speculation); `commit` then names them. A new reservation of a sequence replaces an open one.
        Sequences are served in order; put the owner of joined blocks before its joiners (`blockyard.core.joining`).
        One that cannot be served is told apart in `plan.status`: it gets nothing and keeps what it has, and an open
        reservation of it ends.
        Raises `UnknownSequence` or `InvalidArgument`.
        """
        return self._reserving.reserve(seqs, num_new_tokens)

    def commit(self, seqs: object, num_computed: object, next_tokens: object = None) -> None:
        """Say what the step did: the first `num_computed` reserved tokens of each sequence are computed. O(batch).

        num_computed: integers (B,), or one for all, at most what was reserved; 0 says that the step failed.
        next_tokens: tokens to append, integers (B,) or (B, k) with -1 for none. All known tokens but the last
        must have a block; with num_computed=0 this only appends, as after a fork.
        Full computed blocks become shareable. The reservation ends.
        Raises `UnknownSequence`, `SequenceNotReady` or `InvalidArgument`.
        """
        self._committing.commit(seqs, num_computed, next_tokens)

    def can_append(self, seqs: object, num_new_tokens: object = 1) -> bool:
        """Whether `reserve` would serve all of `seqs` now. O(batch). Changes nothing.

        Cautious by a block where several forks that share their last block are asked about together, and where one
        waits for blocks that another would compute in the same step.
        """
        return self._reserving.can_reserve(seqs, num_new_tokens)

    def append(self, seqs: object, next_tokens: object) -> None:
        """Append tokens to sequences without computing anything: `commit(seqs, 0, next_tokens)`. O(batch)."""
        self._committing.commit(seqs, 0, next_tokens)

    # Forks and cuts.

    def fork(self, seq: object, num_forks: object = 1) -> list[int]:
        """New sequences that share all blocks of `seq`; whoever writes first gets a copy (CoW). O(blocks * forks).

        Returns their handles. Raises `SequenceNotReady` unless all tokens of `seq` are computed, but perhaps the last,
        and nothing is reserved; `OutOfRows`; `InvalidArgument` for a count below 1.
        """
        return self._branching.fork(seq, num_forks)

    def regroup(self, seqs: object, parents: object) -> list[int]:
        """Beam search's step: sequence i becomes a continuation of `seqs[parents[i]]`. O(blocks of forks and drops).

        parents: positions in `seqs`, integers (n,), n of any length. The first child of a sequence is that sequence
        itself, the others are forks of it; sequences without a child are freed. Returns n handles in the order of
        `parents`. Raises as `fork` does for sequences with several children.
        """
        return self._branching.regroup(seqs, parents)

    def truncate(self, seq: object, num_tokens: object) -> None:
        """Forget all but the first `num_tokens` tokens, and give back the blocks behind them. O(blocks freed).

        Raises `SequenceNotReady` while something is reserved or the prompt is not computed, and `InvalidArgument`
        unless 1 <= num_tokens <= the sequence's tokens, or when blocks that lie in the sliding window before the cut
        were given back already.
        """
        self._branching.truncate(seq, num_tokens)

    def free(self, seqs: object) -> None:
        """End sequences, one handle or many, and give their blocks back, last block first. O(blocks).

        Cached blocks stay hittable until they are evicted. Raises `UnknownSequence` for a handle that was freed
        already or never given; then none is freed.
        """
        rows = self._sequences.rows_of(seqs)
        self._sequences.version += 1
        for index in range(i64(len(rows))):
            self._branching.end(rows[index])

    def reset_prefix_cache(self) -> None:
        """No cached block hits any more, from now on; sequences may run, and go on without publishing. O(num_blocks).

        For new weights: keys and values of the old ones must not serve new requests.
        """
        self._sequences.version += 1
        self._pages.reset()
        if self._mapping is not None:
            self._mapping.reset()

    @property
    def generation(self) -> int:
        """How often the cache was reset. A block of an earlier generation never hits."""
        return int(self._pages.index.num_generations)

    # Memory below the GPU.

    def swap_out(self, seqs: object) -> SwapPlan:
        """Move sequences to the CPU pool, all or none: their blocks are free, their handles stay. O(blocks).

        Carry out the plan before the next step. Blocks that only hold tokens yet to be computed are given up. A
        sequence keeps its row; until `swap_in` it cannot be reserved for, but forked, cut, appended to and freed.
        Raises `OutOfBlocks` when the CPU pool has too few free blocks, `SequenceNotReady` while tokens are reserved
        or when one is swapped out already, `InvalidArgument` without a CPU pool.
        """
        return require_cpu(self._swapping, "swap_out").swap_out(seqs)

    def swap_in(self, seqs: object) -> SwapPlan:
        """Bring sequences back, all or none. What the pool still caches of them is shared, not moved. O(blocks).

        Carry out the plan before the next step. Raises `OutOfBlocks`, `SequenceNotReady` for one that is not swapped
        out, `InvalidArgument` without a CPU pool.
        """
        return require_cpu(self._swapping, "swap_in").swap_in(seqs)

    def is_swapped_out(self, seq: object) -> bool:
        """Whether a sequence's blocks are in the CPU pool. O(1)."""
        return self._sequences.is_swapped[self._sequences.row_of(seq)] != 0

    @property
    def cpu_pool(self) -> BlockPool | None:
        """The CPU pool; None without one."""
        return None if self._mapping is None else self._mapping.cpu

    # What is there.

    def num_tokens(self, seq: object) -> int:
        """Known tokens of a sequence. O(1)."""
        return int(self._sequences.num_tokens[self._sequences.row_of(seq)])

    def num_computed_tokens(self, seq: object) -> int:
        """Tokens whose keys and values are there, or will be when the sequence gets its slots. O(1)."""
        return int(self._sequences.num_computed[self._sequences.row_of(seq)])

    def token_ids(self, seq: object) -> npt.NDArray[np.int32]:
        """The known tokens of a sequence, int32 (num_tokens,), a copy. O(tokens)."""
        row = self._sequences.row_of(seq)
        num_tokens = int(self._sequences.num_tokens[row])
        pending = self._sequences.pending_token[row]
        stored = num_tokens if pending == NO_TOKEN else num_tokens - 1
        tokens = self._pages.block_tokens(self._sequences.row_blocks(row), stored)
        return tokens if pending == NO_TOKEN else np.append(tokens, np.int32(pending))

    def block_ids(self, seq: object, group: object = 0) -> npt.NDArray[np.int32]:
        """The blocks of a sequence in order, int32 (n,), a copy. O(blocks). 0 stands behind a sliding window."""
        row = self._sequences.row_of(seq)
        return view_i32(self._table(group).row_blocks(row))

    def num_owned_blocks(self, seqs: object) -> npt.NDArray[np.int64]:
        """Blocks that each sequence holds alone, int64 (B,): what preempting it would free. O(blocks)."""
        rows = self._sequences.rows_of(seqs)
        owned = zeros_i64(len(rows))
        ref_cnt = self.pool.ref_cnt
        for index in range(i64(len(rows))):
            for table in self._reserving.tables:
                first = rows[index] * table.width
                for position in range(first, first + table.num_blocks[rows[index]]):
                    if ref_cnt[i64(table.blocks[position])] == 1:
                        owned[index] += 1
        return view_i64(owned)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """All rows, int32 (max_num_seqs, blocks of max_model_len), padded with 0: read-only, live, without a copy.

        The first layer group's, where there are several; see `group_table`.
        """
        return whole_table(self._reserving.tables[0])

    def group_table(self, group: object) -> npt.NDArray[np.int32]:
        """`block_table` of one layer group."""
        return whole_table(self._table(group))

    def _table(self, group: object) -> BlockTable:
        tables = self._reserving.tables
        return tables[require_int("group", group, 0, len(tables) - 1)]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included. O(1)."""
        return self.pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds. O(1)."""
        return self.pool.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prompt can hit. O(1)."""
        return self.pool.num_cached_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1. O(1)."""
        return self.pool.usage

    @property
    def num_seqs(self) -> int:
        """Running sequences. O(1)."""
        return int(self._sequences.max_num_seqs - self._sequences.num_free_rows)

    def running(self) -> dict[int, str]:
        """The running sequences and their holders: at the end of work, the leak report. O(max_num_seqs)."""
        sequences = self._sequences
        return {int(sequences.handle[i64(row)]): sequences.holders[row] for row in sequences.live_rows()}

    def stats(self) -> CacheStats:
        """Counters since the start and the state now. O(max_num_seqs)."""
        copied = self._reserving.num_copied_blocks if self._mapping is None else self._mapping.num_copied_blocks
        return CacheStats(
            num_prompt_tokens=int(self._admitting.num_prompt_tokens),
            num_hit_tokens=int(self._admitting.num_hit_tokens),
            num_evicted_blocks=int(self.pool.num_evicted_blocks),
            num_copied_blocks=int(copied),
            peak_used_blocks=int(self.pool.peak_used_blocks),
            num_free_blocks=self.num_free_blocks,
            num_used_blocks=self.num_used_blocks,
            num_cached_blocks=self.num_cached_blocks,
            num_running_seqs=self.num_seqs,
            num_wasted_slots=self._num_wasted_slots(),
        )

    def _num_wasted_slots(self) -> int:
        wasted: i64 = 0
        for row in self._sequences.live_rows():
            if self._sequences.is_swapped[i64(row)] == 0:
                for table in self._reserving.tables:
                    slots = table.num_blocks[i64(row)] * table.block_size
                    wasted += max(slots - self._sequences.num_tokens[i64(row)], 0)
        return int(wasted)

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it, with the sequences that hold it. O(all held blocks)."""
        block = self.pool.block(block_id)
        for row in self._sequences.live_rows():
            for table in self._reserving.tables:
                if block.block_id and block.block_id in view_i32(table.row_blocks(i64(row))):
                    block.holders.append(self._sequences.name(i64(row)))
        return block

    def check(self) -> None:
        """Prove the laws on the live manager; see `checking`. O(num_blocks + table). Raises `InvariantError`."""
        self._pages.check()
        check_sequences(self._pages, self._sequences)
        if self._mapping is not None:
            check_mapping(self._mapping)
