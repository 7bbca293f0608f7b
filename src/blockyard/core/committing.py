"""The second phase of a step: what was computed, and what was sampled."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ..errors import InvalidArgument, SequenceNotReady
from ..ids import NO_CONTENT, NO_ROW, NULL_BLOCK
from .arrays import zeros_i64
from .block_pool import BlockPool
from .joining import Joining
from .mapping import Mapping
from .reserving import NO_TOKEN
from .sequences import ALERT, QUIET, SequenceTable
from .tokens import MAX_TOKEN, int64_vector, store_token, token_table

LAST_TOKEN: Final[i64] = MAX_TOKEN


class Committing:
    """Counts tokens as computed, appends new ones, and makes blocks that became full shareable."""

    def __init__(
        self,
        pool: BlockPool,
        sequences: SequenceTable,
        joining: Joining,
        mapping: Mapping | None,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.mapping = mapping
        self.index = pool.index
        self.sequences = sequences
        self.joining = joining
        self.block_size: i64 = pool.block_size
        self.max_model_len: i64 = max_model_len
        #: num_computed as it will be, for the rows of the batch.
        self._reached = zeros_i64(int(sequences.max_num_seqs))

    def commit(self, seqs: object, num_computed: object, next_tokens: object) -> None:
        """See `KVCacheManager.commit`."""
        rows = self.sequences.rows_of(seqs)
        counts = int64_vector("num_computed", num_computed, len(rows))
        table = token_table("next_tokens", next_tokens, len(rows))
        appended = self._check(rows, counts, table.items, table.columns)
        self.sequences.version += 1
        self._append(rows, table.items, table.columns, appended)
        self._advance(rows, counts)

    def _check(self, rows: vec[i64], counts: vec[i64], tokens: vec[i64], columns: i64) -> vec[i64]:
        """Refuse what cannot be, before anything changes; returns how many tokens each sequence gets."""
        sequences = self.sequences
        num_computed = sequences.num_computed
        num_reserved = sequences.num_reserved
        reached = self._reached
        for index in range(i64(len(rows))):
            row = rows[index]
            if counts[index] < 0 or counts[index] > num_reserved[row]:
                raise InvalidArgument(
                    f"num_computed[{index}] is {counts[index]} for {sequences.name(row)}; "
                    f"it must be from 0 to the {num_reserved[row]} tokens reserved"
                )
            reached[row] = num_computed[row] + counts[index]
        appended = self._count_new(tokens, columns, len(rows))
        self._check_lengths(rows, counts, appended)
        return appended

    def _count_new(self, tokens: vec[i64], columns: i64, num_seqs: i64) -> vec[i64]:
        """How many tokens each row of `next_tokens` has before its first -1."""
        appended = zeros_i64(int(num_seqs))
        position: i64 = 0
        for index in range(num_seqs):
            new: i64 = 0
            for column in range(columns):
                token = tokens[position]
                position += 1
                if token >= 0 and token <= LAST_TOKEN and column == new:
                    new += 1
                elif token != NO_TOKEN:
                    self._refuse_token(index, token)
            appended[index] = new
        return appended

    def _refuse_token(self, index: i64, token: i64) -> None:
        if 0 <= token <= LAST_TOKEN:
            raise InvalidArgument(f"next_tokens[{index}] has {token} after -1; -1 may stand only at the end")
        raise InvalidArgument(f"next_tokens[{index}] holds {token}; a token is from 0 to {LAST_TOKEN}, -1 is none")

    def _check_lengths(self, rows: vec[i64], counts: vec[i64], appended: vec[i64]) -> None:
        """Computed tokens must be known, known ones must have a place, joined ones must be computed."""
        sequences = self.sequences
        num_tokens = sequences.num_tokens
        num_blocks = sequences.num_blocks
        alert = sequences.alert
        reached = self._reached
        block_size = self.block_size
        limit = self.max_model_len
        for index in range(i64(len(rows))):
            row = rows[index]
            known = num_tokens[row] + appended[index]
            if reached[row] > known or known > limit:
                self._refuse_length(index, row, reached[row], known)
            if alert[row] != QUIET:
                self._check_prefix(row, counts[index], index)
            if appended[index] > 0 and (alert[row] != QUIET or known > num_blocks[row] * block_size + 1):
                self._check_room(index, row, appended[index])

    def _refuse_length(self, index: i64, row: i64, end: i64, known: i64) -> None:
        name = self.sequences.name(row)
        if end > known:
            raise InvalidArgument(
                f"num_computed[{index}] makes {end} tokens of {name} computed, but only {known} are known: "
                f"next_tokens must name those that were speculated"
            )
        raise InvalidArgument(
            f"next_tokens[{index}] makes {name} {known} tokens long; max_model_len is {self.max_model_len}"
        )

    def _check_prefix(self, row: i64, count: i64, index: i64) -> None:
        """A joiner's step counts only if the blocks it joined are computed, earlier or in this very call."""
        owner = self.sequences.waits_on[row]
        if count == 0 or owner == NO_ROW:
            return
        computed = self._reached[owner] if self.sequences.in_batch(owner) else self.sequences.num_computed[owner]
        if computed < self.sequences.waits_for[row]:
            needed = self.sequences.waits_for[row]
            raise SequenceNotReady(
                f"num_computed[{index}] is {count} for {self.sequences.name(row)}, which joined {needed} tokens of "
                f"{self.sequences.name(owner)}; only {computed} are computed: commit that one first"
            )

    def _check_room(self, index: i64, row: i64, new: i64) -> None:
        """All appended tokens need a writable place in a block, but for one, which may wait for its block."""
        sequences = self.sequences
        first = sequences.num_tokens[row]
        room = sequences.num_blocks[row] * self.block_size - first
        if sequences.pending_token[row] != NO_TOKEN:
            room = -1
        elif room > 0 and sequences.alert[row] != QUIET and not self._is_writable(row, first // self.block_size):
            room = 0
        if new > room + 1:
            raise InvalidArgument(
                f"next_tokens[{index}] has {new} tokens for {sequences.name(row)}; "
                f"{room + 1} fit before the next reserve gives it blocks of its own"
            )

    def _is_writable(self, row: i64, position: i64) -> bool:
        block = self.sequences.block_at(row, position)
        return self.pool.ref_cnt[block] == 1 and self.index.identity[2 * block] == NO_CONTENT

    def _append(self, rows: vec[i64], tokens: vec[i64], columns: i64, appended: vec[i64]) -> None:
        """Store new tokens in the blocks of their sequences; one without a writable place waits in its row."""
        sequences = self.sequences
        num_tokens = sequences.num_tokens
        num_blocks = sequences.num_blocks
        alert = sequences.alert
        blocks = sequences.blocks
        width = sequences.width
        words = self.index.words
        first_word = self.index.first_word
        num_words = self.index.num_words
        block_size = self.block_size
        for index in range(i64(len(rows))):
            row = rows[index]
            first = index * columns
            for position in range(first, first + appended[index]):
                length = num_tokens[row]
                num_tokens[row] = length + 1
                logical = num_blocks[row] - 1
                if length < logical * block_size:
                    logical = length // block_size
                offset = length - logical * block_size
                if offset < block_size and (alert[row] == QUIET or self._is_writable(row, logical)):
                    store_token(
                        words, first_word + i64(blocks[row * width + logical]) * num_words, offset, tokens[position]
                    )
                else:
                    sequences.pending_token[row] = tokens[position]
                    alert[row] = ALERT

    def _advance(self, rows: vec[i64], counts: vec[i64]) -> None:
        """Count tokens as computed, and share the blocks that this makes full."""
        num_computed = self.sequences.num_computed
        num_reserved = self.sequences.num_reserved
        num_published = self.sequences.num_published
        block_size = self.block_size
        for index in range(i64(len(rows))):
            row = rows[index]
            num_reserved[row] = 0
            before = num_computed[row]
            after = before + counts[index]
            num_computed[row] = after
            promised = num_published[row] * block_size
            if before < promised or after >= promised + block_size:
                self._publish(row, before // block_size, after // block_size)
            if self.mapping is not None:
                self.mapping.slide(row)

    def _publish(self, row: i64, first: i64, last: i64) -> None:
        """Blocks `first` to `last` of a row are full and computed now: what waits in the index becomes real."""
        published = self.sequences.num_published[row]
        for position in range(first, min(last, published)):
            block = self.sequences.block_at(row, position)
            if i64(self.index.owner[block]) == row + 1:
                self.index.set_computed(block)
        if not self.pool.enable_prefix_caching or self.sequences.generation[row] != self.index.num_generations:
            return
        for position in range(max(first, published), last):
            self._index_block(row, position)
        self.sequences.num_published[row] = max(last, published)
        if self.mapping is not None and last > published:
            self.mapping.publish(row, published, last)

    def _index_block(self, row: i64, position: i64) -> None:
        root = self.sequences.root[row]
        block = self.sequences.block_at(row, position)
        before = self.sequences.block_at(row, position - 1) if position > 0 else NULL_BLOCK
        parent = self.index.identity[2 * before] if position > 0 else root
        spans = self.sequences.spans[row]
        if spans and int(position) in spans:
            parent = self.index.root((int(parent), spans[int(position)]))
            before = NULL_BLOCK
        self.index.insert(block, self.index.hash_block(block, before, parent), parent)
