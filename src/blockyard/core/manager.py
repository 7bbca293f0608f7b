"""The manager: the two-phase life of sequences over one pool of blocks."""

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64

from ..answers import Admission, CacheStats
from ..arguments import require_int, require_str
from ..config import CacheConfig
from ..errors import InvalidArgument, NeverFits, OutOfBlocks, SequenceNotReady
from ..keys import canonical_keys
from .arrays import view_i32
from .block import KVCacheBlock
from .block_pool import BlockPool
from .checking import check_sequences
from .committing import Committing
from .joining import Joining
from .plan import StepPlan
from .reserving import NO_TOKEN, Reserving
from .sequences import ALERT, SequenceTable
from .tokens import PackedTokens, pack_tokens


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
        self.pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_caching, config.hash_seed)
        self.block_size: i64 = config.block_size
        self._sequences = SequenceTable(config.max_num_seqs, config.max_blocks_per_seq)
        self._joining = Joining(self._sequences, self.pool.index, config.block_size)
        self._reserving = Reserving(self.pool, self._sequences, self._joining, config.max_model_len)
        self._committing = Committing(self.pool, self._sequences, self._joining, config.max_model_len)
        self._watermark: i64 = config.watermark_blocks
        self._max_model_len: i64 = config.max_model_len
        self._num_prompt_tokens: i64 = 0
        self._num_hit_tokens: i64 = 0

    # Admission.

    def can_allocate(self, token_ids: object, extra_keys: object = ()) -> Admission:
        """Whether `allocate` would take this prompt: OK, LATER or NEVER. O(tokens). Changes nothing.

        The watermark counts as used, so that running sequences can grow without evicting one another.
        """
        keys = canonical_keys(extra_keys)
        packed = pack_tokens(token_ids, self.pool.block_size)
        if self._never_fits(packed.num_tokens):
            return Admission.NEVER
        found = self._find(packed, keys)
        if self._sequences.num_free_rows == 0 or self._num_missing(packed.num_tokens, found) > 0:
            return Admission.LATER
        return Admission.OK

    def allocate(self, token_ids: object, holder: object = "", extra_keys: object = ()) -> int:
        """Admit a prompt: hold the blocks of its longest cached prefix, and new ones for the rest. O(tokens).

        token_ids: integers (n,), as a list, an int32 or int64 array, a torch tensor, or anything with a buffer.
        holder: a name for errors and leak reports. extra_keys: see `blockyard.LoRA` and `blockyard.CacheSalt`.
        Returns the sequence's handle. `num_computed_tokens` then tells the hit: whole blocks, never the last token.
        Raises `NeverFits`, `OutOfBlocks` (ask `can_allocate` first), `OutOfRows` or `InvalidArgument`.
        """
        keys = canonical_keys(extra_keys)
        packed = pack_tokens(token_ids, self.pool.block_size)
        name = require_str("holder", holder)
        if self._never_fits(packed.num_tokens):
            self._refuse_for_ever(packed.num_tokens)
        self._sequences.require_rows(1)
        found = self._find(packed, keys)
        if self._num_missing(packed.num_tokens, found) > 0:
            self._refuse_for_now(packed.num_tokens, found)
        # Whatever may run a caller's code (hashing keys) or need memory comes before the first change.
        root = self.pool.index.root(keys)
        self.pool.index.make_room(packed.num_tokens // self.block_size)
        self._sequences.version += 1
        row = self._open(packed, root, name, found)
        return int(self._sequences.handle[row])

    def _num_blocks(self, num_tokens: i64) -> i64:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _never_fits(self, num_tokens: i64) -> bool:
        usable = i64(self.pool.num_blocks) - 1 - self._watermark
        return num_tokens > self._max_model_len or self._num_blocks(num_tokens) > usable

    def _find(self, packed: PackedTokens, keys: tuple[object, ...]) -> i64:
        """Blocks of the longest usable hit; at least the last token is left to compute."""
        found = self.pool.find(packed.words, (packed.num_tokens - 1) // self.block_size, keys)
        return self._joining.joinable(found, self.pool.ref_cnt)

    def _num_missing(self, num_tokens: i64, found: i64) -> i64:
        """Blocks by which the free ones, less the watermark, fall short; idle hits leave the free ones too."""
        needed = self._num_blocks(num_tokens) - found + self.pool.count_idle(self.pool.index.found, found)
        return needed - (self.pool.queue.num_free - self._watermark)

    def _refuse_for_ever(self, num_tokens: i64) -> None:
        if num_tokens > self._max_model_len:
            raise NeverFits(f"token_ids has {num_tokens} tokens; max_model_len is {self._max_model_len}")
        raise NeverFits(
            f"token_ids needs {self._num_blocks(num_tokens)} blocks; the pool has {self.pool.num_usable_blocks}, "
            f"of which the watermark keeps {self._watermark} free"
        )

    def _refuse_for_now(self, num_tokens: i64, found: i64) -> None:
        needed = int(self._num_blocks(num_tokens) - found)
        free = self.pool.num_free_blocks
        idle = int(self.pool.count_idle(self.pool.index.found, found))
        raise OutOfBlocks(
            f"token_ids needs {needed} new blocks and {idle} idle ones it hits; {free} are free, "
            f"of which the watermark keeps {self._watermark}",
            needed + idle,
            free,
        )

    def _open(self, packed: PackedTokens, root: i64, holder: str, found: i64) -> i64:
        sequences = self._sequences
        row = sequences.open(holder)
        sequences.num_tokens[row] = packed.num_tokens
        sequences.num_computed[row] = found * self.block_size
        sequences.num_published[row] = found
        sequences.pending_token[row] = NO_TOKEN
        sequences.generation[row] = self.pool.index.num_generations
        self._joining.join(row, found)
        self._fill_row(row, packed, found)
        stored = found
        if self.pool.enable_prefix_caching:
            stored = self._publish_prompt(row, packed, found, root)
        start = row * sequences.width
        self.pool.index.store_rows(packed.words, stored, sequences.num_blocks[row], sequences.blocks, start)
        self._num_prompt_tokens += packed.num_tokens
        self._num_hit_tokens += found * self.block_size
        return row

    def _fill_row(self, row: i64, packed: PackedTokens, found: i64) -> None:
        """Hits first, so that no new block is taken from among them; then new blocks."""
        blocks = self._sequences.blocks
        hits = self.pool.index.found
        first = row * self._sequences.width
        for position in range(found):
            blocks[first + position] = hits[position]
        self.pool.share(hits, 0, found)
        num_blocks = self._num_blocks(packed.num_tokens)
        self.pool.acquire(blocks, first + found, num_blocks - found)
        self._sequences.num_blocks[row] = num_blocks

    def _publish_prompt(self, row: i64, packed: PackedTokens, found: i64, root: i64) -> i64:
        """Index the full blocks of a prompt as owned by `row`, before they are computed (see `joining`)."""
        index = self.pool.index
        blocks = self._sequences.blocks
        start = row * self._sequences.width
        last = max(found, packed.num_tokens // self.block_size)
        index.hash_missed(packed.words, found, last, root)
        parent = index.identity[2 * i64(blocks[start + found - 1])] if found > 0 else root
        index.insert_run(packed.words, found, last, blocks, start, parent, row + 1)
        self._sequences.root[row] = root
        self._sequences.num_published[row] = last
        return last

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

    # Forks and cuts.

    def fork(self, seq: object, num_forks: object = 1) -> list[int]:
        """New sequences that share all blocks of `seq`; whoever writes first gets a copy (CoW). O(blocks * forks).

        Returns their handles. Raises `SequenceNotReady` unless all tokens of `seq` are computed, but perhaps the last,
        and nothing is reserved; `OutOfRows`; `InvalidArgument` for a count below 1.
        """
        row = self._sequences.row_of(seq)
        count = require_int("num_forks", num_forks, 1, int(self._sequences.max_num_seqs))
        self._require_settled(row, "fork")
        if self._sequences.num_computed[row] < self._sequences.num_tokens[row] - 1:
            raise SequenceNotReady(
                f"fork: {self._sequences.name(row)} has computed {self._sequences.num_computed[row]} "
                f"of {self._sequences.num_tokens[row]} tokens; all but the last are needed"
            )
        self._sequences.require_rows(count)
        self._sequences.version += 1
        return [self._fork_once(row) for _ in range(count)]

    def _fork_once(self, row: i64) -> int:
        sequences = self._sequences
        child = sequences.open(sequences.holders[row])
        shared = min(sequences.num_blocks[row], self._num_blocks(sequences.num_tokens[row]))
        first = row * sequences.width
        for position in range(shared):
            sequences.blocks[child * sequences.width + position] = sequences.blocks[first + position]
        self.pool.share(sequences.blocks, first, shared)
        sequences.num_blocks[child] = shared
        sequences.num_tokens[child] = sequences.num_tokens[row]
        sequences.num_computed[child] = sequences.num_computed[row]
        sequences.num_published[child] = sequences.num_published[row]
        sequences.pending_token[child] = sequences.pending_token[row]
        sequences.root[child] = sequences.root[row]
        sequences.generation[child] = sequences.generation[row]
        sequences.alert[child] = ALERT
        sequences.alert[row] = ALERT
        return int(sequences.handle[child])

    def _require_settled(self, row: i64, action: str) -> None:
        """Nothing in flight: no reservation, nothing published that is not computed, no prefix to wait for."""
        sequences = self._sequences
        if sequences.num_reserved[row] > 0:
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has {sequences.num_reserved[row]} reserved tokens; commit them first"
            )
        promised = sequences.num_published[row] * self.block_size
        if promised > sequences.num_computed[row] or sequences.is_waiting(row):
            raise SequenceNotReady(
                f"{action}: {sequences.name(row)} has computed {sequences.num_computed[row]} of its prompt; "
                f"{max(promised, sequences.num_computed[row] + 1)} tokens are needed"
            )

    def truncate(self, seq: object, num_tokens: object) -> None:
        """Forget all but the first `num_tokens` tokens, and give back the blocks behind them. O(blocks freed).

        Raises `SequenceNotReady` while something is reserved or the prompt is not computed, and `InvalidArgument`
        unless 1 <= num_tokens <= the sequence's tokens.
        """
        sequences = self._sequences
        row = sequences.row_of(seq)
        length = i64(require_int("num_tokens", num_tokens, 1, int(sequences.num_tokens[row])))
        self._require_settled(row, "truncate")
        sequences.version += 1
        self._joining.settle_waiters(row)
        self._joining.settle(row)
        keep = min(self._num_blocks(length), sequences.num_blocks[row])
        self._drop_blocks(row, keep)
        if length < sequences.num_tokens[row]:
            sequences.pending_token[row] = NO_TOKEN
        sequences.num_tokens[row] = length
        sequences.num_computed[row] = min(sequences.num_computed[row], length)
        sequences.num_published[row] = min(sequences.num_published[row], length // self.block_size)
        sequences.alert[row] = ALERT

    def _drop_blocks(self, row: i64, keep: i64) -> None:
        sequences = self._sequences
        first = row * sequences.width
        self.pool.release(sequences.blocks, first + keep, sequences.num_blocks[row] - keep)
        for position in range(keep, sequences.num_blocks[row]):
            sequences.blocks[first + position] = 0
        sequences.num_blocks[row] = keep

    def free(self, seqs: object) -> None:
        """End sequences, one handle or many, and give their blocks back, last block first. O(blocks).

        Cached blocks stay hittable until they are evicted. Raises `UnknownSequence` for a handle that was freed
        already or never given; then none is freed.
        """
        rows = self._sequences.rows_of(seqs)
        self._sequences.version += 1
        for index in range(i64(len(rows))):
            row = rows[index]
            self._joining.leave(row)
            self.pool.release(self._sequences.blocks, row * self._sequences.width, self._sequences.num_blocks[row])
            self._sequences.close(row)

    def reset_prefix_cache(self) -> None:
        """No cached block hits any more, from now on; sequences may run, and go on without publishing. O(num_blocks).

        For new weights: keys and values of the old ones must not serve new requests.
        """
        self._sequences.version += 1
        self.pool.reset()

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
        tokens = self.pool.block_tokens(self._sequences.row_blocks(row), stored)
        return tokens if pending == NO_TOKEN else np.append(tokens, np.int32(pending))

    def block_ids(self, seq: object) -> npt.NDArray[np.int32]:
        """The blocks of a sequence in order, int32 (n,), a copy. O(blocks)."""
        return view_i32(self._sequences.row_blocks(self._sequences.row_of(seq)))

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """All rows, int32 (max_num_seqs, blocks of max_model_len), padded with 0: read-only, live, without a copy."""
        return view_i32(self._sequences.blocks).reshape(int(self._sequences.max_num_seqs), int(self._sequences.width))

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
        wasted: i64 = 0
        for row in self._sequences.live_rows():
            slots = self._sequences.num_blocks[i64(row)] * self.block_size
            wasted += max(slots - self._sequences.num_tokens[i64(row)], 0)
        return CacheStats(
            num_prompt_tokens=int(self._num_prompt_tokens),
            num_hit_tokens=int(self._num_hit_tokens),
            num_evicted_blocks=int(self.pool.num_evicted_blocks),
            num_copied_blocks=int(self._reserving.num_copied_blocks),
            peak_used_blocks=int(self.pool.peak_used_blocks),
            num_free_blocks=self.num_free_blocks,
            num_used_blocks=self.num_used_blocks,
            num_cached_blocks=self.num_cached_blocks,
            num_running_seqs=self.num_seqs,
            num_wasted_slots=int(wasted),
        )

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it, with the sequences that hold it. O(all held blocks)."""
        block = self.pool.block(block_id)
        for row in self._sequences.live_rows():
            if block.block_id and block.block_id in view_i32(self._sequences.row_blocks(i64(row))):
                block.holders.append(self._sequences.name(i64(row)))
        return block

    def check(self) -> None:
        """Prove the laws on the live manager; see `checking`. O(num_blocks + table). Raises `InvariantError`."""
        self.pool.check()
        check_sequences(self.pool, self._sequences)
