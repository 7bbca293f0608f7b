"""The second phase of a step: counts computed tokens and appends sampled ones."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument, SequenceNotReady
from ...ids import NO_ROW, NULL_BLOCK
from ..arrays import filled_i64, zeros_i64
from ..parts import Parts
from ..sequences.table import NO_TOKEN, QUIET
from ..tokens import HIGH_HALF, LAST_TOKEN, LOW_HALF, TokenTable, store_token
from .counting import PromptCounts
from .in_flight import Steps, ended_with_owner

#: Addition to errors about sequences without reserved tokens.
NOT_SCHEDULED: Final = (
    "; it has no reserved tokens: pass 0 and -1 for a sequence that is not SCHEDULED in plan.status, and reserve again "
    "if append or commit has ended its reservation"
)
#: Result of a `commit` that skipped no sequence.
_NONE: Final[tuple[int, ...]] = ()


class CommitCalls:
    """Counts tokens as computed, appends new ones, and publishes blocks that became full."""

    def __init__(self, parts: Parts, steps: Steps, counts: PromptCounts) -> None:
        self.parts = parts
        self.counts = counts
        self.steps = steps
        self.token_blocks = parts.token_blocks
        self.index = parts.token_blocks.index
        self.sequences = parts.sequences
        self.store = parts.store
        self.states = parts.states
        self.block_size: i64 = parts.block_size
        self.max_model_len: i64 = parts.config.max_model_len
        sequences = parts.sequences
        #: By row of the batch, num_computed after the call.
        self._reached = zeros_i64(int(sequences.max_num_seqs))
        #: Batch positions of sequences to recheck before anything changes.
        self._late = zeros_i64(int(sequences.max_num_seqs))
        #: Batch positions of sequences that filled a block; the blocks, and their parents.
        self._filled = zeros_i64(int(sequences.max_num_seqs))
        self._filled_blocks = zeros_i64(int(sequences.max_num_seqs))
        self._filled_parents = zeros_i64(int(sequences.max_num_seqs))

    def commit(self, rows: vec[i64], counts: vec[i64], table: TokenTable, step: i64) -> tuple[int, ...]:
        """Count `counts` tokens as computed in `step`, and append the tokens in `table`.

        Return the sequences that were skipped because their reservation ended with that of another sequence.
        """
        if self.sequences.num_ended > 0:
            places = self._ended(rows, counts, step)
            if places:
                return self._commit_others(rows, counts, table, step, places)
        self._commit(rows, counts, table, step)
        return _NONE

    def _ended(self, rows: vec[i64], counts: vec[i64], step: i64) -> list[int]:
        """Return the batch positions whose reservation in this step ended with that of a freed sequence."""
        sequences = self.sequences
        places: list[int] = []
        for index in range(i64(len(rows))):
            row = rows[index]
            if sequences.ended_by[row] == 0 or not 0 < counts[index] <= sequences.ended_count[row]:
                continue
            if sequences.ended_at[row] == step and (self.steps.are_numbered or sequences.num_reserved[row] == 0):
                places.append(int(index))
        return places

    def _commit_others(
        self, rows: vec[i64], counts: vec[i64], table: TokenTable, step: i64, places: list[int]
    ) -> tuple[int, ...]:
        """Commit the batch, but nothing for the sequences at `places`. Return those sequences."""
        left = counts[:]
        tokens = table.items[:]
        handles: list[int] = []
        for place in places:
            left[i64(place)] = 0
            for column in range(table.columns):
                tokens[i64(place) * table.columns + column] = NO_TOKEN
            handles.append(int(self.sequences.handle[rows[i64(place)]]))
        answer: tuple[int, ...] = tuple(handles)
        self._commit(rows, left, TokenTable(tokens, table.columns), step)
        for place in places:
            self.sequences.forget_end(rows[i64(place)])
        return answer

    def _commit(self, rows: vec[i64], counts: vec[i64], table: TokenTable, step: i64) -> None:
        self.steps.check_commit(rows, counts, table, step)
        if table.columns > 1:
            appended = self._count_new(table.items, table.columns, len(rows))
            self._check_many(rows, counts, appended)
            self.sequences.version += 1
            self._append_many(rows, table.items, table.columns, appended)
            self._advance(rows, counts, self._no_tokens(len(rows)))
        else:
            tokens = table.items if table.columns == 1 else self._no_tokens(len(rows))
            self._check(rows, counts, tokens)
            self.sequences.version += 1
            self._advance(rows, counts, tokens)
        self.steps.settle(rows, counts, step)
        if self.states is not None:
            self.states.settle(rows)

    def _no_tokens(self, num_seqs: int) -> vec[i64]:
        return filled_i64(NO_TOKEN, num_seqs)

    def _check(self, rows: vec[i64], counts: vec[i64], tokens: vec[i64]) -> None:
        """Refuse invalid arguments of a decode step, before anything changes.

        A step has at most one token per sequence.
        """
        sequences = self.sequences
        num_tokens = sequences.num_tokens
        num_computed = sequences.num_computed
        num_reserved = sequences.num_reserved
        ready = sequences.ready
        limit = self.max_model_len
        late = self._late
        num_late: i64 = 0
        for index in range(i64(len(rows))):
            row = rows[index]
            count = counts[index]
            token = tokens[index]
            known = num_tokens[row]
            if count < 0 or count > num_reserved[row]:
                self._refuse_count(index, row, count)
            if token >= 0:
                known += 1
                if token > LAST_TOKEN:
                    self._refuse_token(index, token)
            elif token != NO_TOKEN:
                self._refuse_token(index, token)
            if num_computed[row] + count > known or known > limit:
                self._refuse_length(index, row, num_computed[row] + count, known)
            if known > ready[row]:
                late[num_late] = index
                num_late += 1
        if num_late > 0:
            self._check_late(rows, counts, tokens, num_late)

    def _check_late(self, rows: vec[i64], counts: vec[i64], tokens: vec[i64], num_late: i64) -> None:
        """Check the sequences that wait for others, lack a block for their token, or end in a shareable block."""
        sequences = self.sequences
        late = self._late
        for place in range(num_late):
            if sequences.waits_on[rows[late[place]]] != NO_ROW:
                self._note_reached(rows, counts)
                break
        for place in range(num_late):
            index = late[place]
            row = rows[index]
            if sequences.alert[row] != QUIET:
                self._check_prefix(row, counts[index], index)
            if tokens[index] != NO_TOKEN:
                self._check_room(index, row, 1)

    def _note_reached(self, rows: vec[i64], counts: vec[i64]) -> None:
        for index in range(i64(len(rows))):
            self._reached[rows[index]] = self.sequences.num_computed[rows[index]] + counts[index]

    def _refuse_count(self, index: i64, row: i64, count: i64) -> None:
        raise InvalidArgument(
            f"num_computed[{index}] is {count} for {self.sequences.name(row)}; it must be from 0 to the "
            f"{self.sequences.num_reserved[row]} tokens reserved{self._why_not_reserved(row)}"
        )

    def _why_not_reserved(self, row: i64) -> str:
        """Return a clause for errors about a sequence without reserved tokens; "" if it has some."""
        if self.sequences.num_reserved[row] > 0:
            return ""
        return ended_with_owner(self.sequences, row) or NOT_SCHEDULED

    def _check_many(self, rows: vec[i64], counts: vec[i64], appended: vec[i64]) -> None:
        """Refuse invalid arguments of a step with several tokens per sequence, before anything changes."""
        sequences = self.sequences
        self._note_reached(rows, counts)
        for index in range(i64(len(rows))):
            row = rows[index]
            if counts[index] < 0 or counts[index] > sequences.num_reserved[row]:
                self._refuse_count(index, row, counts[index])
            known = sequences.num_tokens[row] + appended[index]
            if self._reached[row] > known or known > self.max_model_len:
                self._refuse_length(index, row, self._reached[row], known)
            if sequences.alert[row] != QUIET:
                self._check_prefix(row, counts[index], index)
            if appended[index] > 0:
                self._check_room(index, row, appended[index])

    def _count_new(self, tokens: vec[i64], columns: i64, num_seqs: i64) -> vec[i64]:
        """Return how many tokens each row of `next_tokens` has before its first -1."""
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
            raise InvalidArgument(f"next_tokens[{index}] has {token} after -1; use -1 only at the end")
        raise InvalidArgument(
            f"next_tokens[{index}] has {token}; a token must be from 0 to {LAST_TOKEN}, or -1 for none"
        )

    def _refuse_length(self, index: i64, row: i64, end: i64, known: i64) -> None:
        name = self.sequences.name(row)
        if end > known:
            raise InvalidArgument(
                f"num_computed[{index}] makes {end} tokens of {name} computed, but only {known} are known: "
                f"pass the speculated ones in next_tokens"
            )
        raise InvalidArgument(
            f"next_tokens[{index}] makes {name} {known} tokens long; max_model_len is {self.max_model_len}"
        )

    def _check_prefix(self, row: i64, count: i64, index: i64) -> None:
        """Refuse tokens of a waiter unless the blocks that it shares are computed, before or by this call."""
        owner = self.sequences.waits_on[row]
        if count == 0 or owner == NO_ROW:
            return
        computed = self._reached[owner] if self.sequences.in_batch(owner) else self.sequences.num_computed[owner]
        if computed < self.sequences.waits_for[row]:
            needed = self.sequences.waits_for[row]
            raise SequenceNotReady(
                f"num_computed[{index}] is {count} for {self.sequences.name(row)}, which shares {needed} tokens of "
                f"{self.sequences.name(owner)}; only {computed} of them are computed: commit more of "
                f"the latter, before this sequence or together with it"
            )

    def _check_room(self, index: i64, row: i64, new: i64) -> None:
        """Refuse more new tokens than there are writable positions, plus one that waits for its block."""
        sequences = self.sequences
        first = sequences.num_tokens[row]
        room = sequences.num_blocks[row] * self.block_size - first
        if sequences.pending_token[row] != NO_TOKEN:
            room = -1
        elif room > 0 and sequences.alert[row] != QUIET and not self._is_writable(row, first // self.block_size):
            room = 0
        if new > room + 1:
            raise InvalidArgument(
                f"next_tokens[{index}] has {new} tokens for {sequences.name(row)}; only {room + 1} fit until the next "
                f"reserve allocates blocks{self._why_not_reserved(row)}"
            )

    def _is_writable(self, row: i64, position: i64) -> bool:
        block = self.sequences.block_at(row, position)
        return self.token_blocks.ref_cnt[block] == 1 and not self.index.is_cached(block)

    def _append_many(self, rows: vec[i64], tokens: vec[i64], columns: i64, appended: vec[i64]) -> None:
        for index in range(i64(len(rows))):
            for position in range(index * columns, index * columns + appended[index]):
                self._append_one(rows[index], tokens[position])

    def _append_one(self, row: i64, token: i64) -> None:
        sequences = self.sequences
        length = sequences.num_tokens[row]
        sequences.num_tokens[row] = length + 1
        logical = length // self.block_size
        if logical < sequences.num_blocks[row] and (sequences.alert[row] == QUIET or self._is_writable(row, logical)):
            first = self.index.rows.start_of(sequences.block_at(row, logical))
            store_token(self.index.rows.words, first, length - logical * self.block_size, token)
        else:
            sequences.pending_token[row] = token
            sequences.raise_alert(row)

    def _advance(self, rows: vec[i64], counts: vec[i64], tokens: vec[i64]) -> None:
        """Append one new token per sequence, count computed tokens, and publish blocks that became full.

        This is one pass over the batch. A token without a writable position waits in its row.
        """
        sequences = self.sequences
        if sequences.num_uncounted > 0:
            self.counts.count(rows, counts)
        num_tokens = sequences.num_tokens
        num_computed = sequences.num_computed
        num_reserved = sequences.num_reserved
        num_published = sequences.num_published
        ready = sequences.ready
        tail = sequences.tail
        words = self.index.rows.words
        first_word = self.index.rows.first_word
        num_words = self.index.rows.num_words
        block_size = self.block_size
        filled = self._filled
        num_filled: i64 = 0
        for index in range(i64(len(rows))):
            row = rows[index]
            token = tokens[index]
            if token != NO_TOKEN:
                length = num_tokens[row]
                offset = length - ready[row] + block_size
                if offset < 0 or offset >= block_size:
                    self._append_one(row, token)
                else:
                    num_tokens[row] = length + 1
                    position = first_word + tail[row] * num_words + (offset >> 1)
                    if offset & 1 == 0:
                        words[position] = token
                    else:
                        words[position] = (words[position] & LOW_HALF) + token * HIGH_HALF
            num_reserved[row] = 0
            before = num_computed[row]
            after = before + counts[index]
            num_computed[row] = after
            promised = num_published[row] * block_size
            if before < promised or after >= promised + block_size:
                filled[num_filled] = index
                num_filled += 1
        if num_filled > 0:
            self._share(rows, counts, num_filled)
        self.store.slide(rows)

    def _share(self, rows: vec[i64], counts: vec[i64], num_filled: i64) -> None:
        """Publish the filled blocks: in one pass if each sequence filled exactly one, else by sequence."""
        if self._is_simple(rows, counts, num_filled):
            self._publish_at_once(rows, num_filled)
            return
        block_size = self.block_size
        for position in range(num_filled):
            row = rows[self._filled[position]]
            after = self.sequences.num_computed[row]
            before = after - counts[self._filled[position]]
            self._publish(row, before // block_size, after // block_size)

    def _is_simple(self, rows: vec[i64], counts: vec[i64], num_filled: i64) -> bool:
        """Return whether each sequence filled exactly one block, without spans and not published before."""
        sequences = self.sequences
        if not self.token_blocks.enable_prefix_caching:
            return False
        generation = self.index.num_generations
        block_size = self.block_size
        for position in range(num_filled):
            row = rows[self._filled[position]]
            published = sequences.num_published[row]
            after = sequences.num_computed[row]
            before = after - counts[self._filled[position]]
            if after // block_size != published + 1 or before < published * block_size:
                return False
            if sequences.generation[row] != generation or sequences.spans[row]:
                return False
        return True

    def _publish_at_once(self, rows: vec[i64], num_filled: i64) -> None:
        """Index the block that each sequence filled, in short passes whose iterations are independent."""
        sequences = self.sequences
        blocks = self._filled_blocks
        parents = self._filled_parents
        for position in range(num_filled):
            row = rows[self._filled[position]]
            published = sequences.num_published[row]
            first = row * sequences.width + published
            blocks[position] = i64(sequences.blocks[first])
            # The parent of a first block is its root, marked by a negative sign.
            parents[position] = i64(sequences.blocks[first - 1]) if published > 0 else -sequences.root[row]
            sequences.num_published[row] = published + 1
        self.index.insert_scattered(blocks, parents, num_filled)
        if not self.store.shares_at_once:
            self.store.publish_last(rows, self._filled, num_filled)

    def _publish(self, row: i64, first: i64, last: i64) -> None:
        """Publish the full, computed blocks `first` to `last` of a row; those that were pending become computed."""
        published = self.sequences.num_published[row]
        num_waiting = min(last, published) - first
        if num_waiting > 0:
            self.index.set_computed(self.sequences.blocks, row * self.sequences.width + first, num_waiting, row + 1)
        if not self.token_blocks.enable_prefix_caching or self.sequences.generation[row] != self.index.num_generations:
            return
        for position in range(max(first, published), last):
            self._index_block(row, position)
        self.sequences.num_published[row] = max(last, published)
        if last > published:
            self.store.publish(row, published, last)

    def _index_block(self, row: i64, position: i64) -> None:
        root = self.sequences.root[row]
        block = self.sequences.block_at(row, position)
        before = self.sequences.block_at(row, position - 1) if position > 0 else NULL_BLOCK
        parent = self.index.content_of(before) if position > 0 else root
        spans = self.sequences.spans[row]
        if spans and int(position) in spans:
            parent = self.index.root((int(parent), spans[int(position)]))
            before = NULL_BLOCK
        chain_hash = self.index.hash_block(block, before, parent)
        if before != NULL_BLOCK:
            before = self.index.representative(parent, self.index.chain_hash[before], before)
        self.index.insert(block, chain_hash, parent, before)
