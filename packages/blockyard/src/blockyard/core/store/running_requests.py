"""Running sequences, as the registry of checkpoints knows them."""

from mypy_extensions import i64

from ...ids import NO_CONTENT, NULL_BLOCK
from ..blocks.ledger import BlockLedger
from ..index.hashing import root_hash
from ..index.prompt import Hit, Prompt
from ..policies.states.checkpoint import NO_SESSION, OUTPUT_END, PROMPT_END, SHARED
from ..policies.states.prefix_tree import NO_CHECKPOINT, ROOT
from ..policies.states.registry import CheckpointRegistry
from ..policies.states.request_record import NO_RECORD
from ..sequences.table import UNDONE, SequenceTable
from .content_ledger import ContentLedger
from .group_table import GroupTable


class RunningRequests:
    """The request record of each row, and the checkpoints that the registry has of it.

    Attributes:
        records: by row, its request record; `NO_RECORD` if its prompt is not cached.
    """

    def __init__(
        self, registry: CheckpointRegistry, pool: ContentLedger, token_blocks: BlockLedger, sequences: SequenceTable
    ) -> None:
        self.registry = registry
        self.block_map = registry.block_map
        self.pool = pool
        self.token_blocks = token_blocks
        self.sequences = sequences
        self.records = [NO_RECORD] * int(sequences.max_num_seqs)
        self._nothing: list[int] = []
        #: By row, the numbers of its checkpoints in the registry.
        self._taken = [self._nothing] * int(sequences.max_num_seqs)

    def open(self, row: i64) -> None:
        """Forget the record of a row."""
        self.records[row] = NO_RECORD
        self._taken[row] = self._nothing

    def begin(self, row: i64, prompt: Prompt, hit: Hit, last: i64) -> None:
        """Begin the record of a prompt, up to its next span. O(blocks).

        last: the longest hit that a later request can have of it.
        """
        index = self.token_blocks.index
        found = hit.num_usable
        num_blocks = min(prompt.num_tokens // self.registry.block_size, prompt.next_span_block(found - 1))
        num_blocks = max(num_blocks, found)
        chain = root_hash(hit.root) if found == 0 else index.chain_hash[i64(hit.blocks[found - 1])]
        # Blocks that the prompt hits have hashes already.
        index.hash_run(prompt.words, found, num_blocks, chain)
        keys = index.hashes[:num_blocks]
        for place in range(found):
            keys[place] = index.chain_hash[i64(hit.blocks[place])]
        self.records[row] = self.registry.begin_request(keys, num_blocks, last, found * self.registry.block_size)

    def fork(self, row: i64, child: i64) -> None:
        """Let `child` go on with a copy of the record of `row`."""
        if self.records[row] is not NO_RECORD:
            self.records[child] = self.records[row].fork()

    def extend(self, row: i64) -> None:
        """Add the token blocks that a row has published since: those of its output, and after spans."""
        index = self.token_blocks.index
        record = self.records[row]
        place = record.num_nodes
        while place < self.sequences.num_published[row]:
            token_block = self.sequences.block_at(row, place)
            if not index.is_cached(token_block):
                return
            self.registry.extend(record, index.chain_hash[token_block])
            place += 1
            if record.num_nodes < place:
                return

    def add_checkpoint(self, row: i64, position: i64, kind: i64, blocks: list[int]) -> None:
        """Add a cached checkpoint of a row to the registry. Its prefix is needed from now on."""
        registry = self.registry
        number = registry.add(self.records[row], position, kind)
        if number == NO_CHECKPOINT:
            return
        checkpoint = registry.get(number)
        self.block_map.set_checkpoint(checkpoint, blocks)
        registry.set_held(number, self.pool.ref_cnt[i64(blocks[0])] > 0)
        self._taken[row] = [*self._taken[row], int(number)]
        node = checkpoint.node
        count = checkpoint.own_tokens // registry.block_size
        while node != ROOT and count > 0:
            for block in self.block_map.blocks_at(node):
                self._judge_again(i64(block))
            count -= 1
            node = registry.tree.parent[node]
        for block in blocks:
            self._judge_again(i64(block))

    def _judge_again(self, block: i64) -> None:
        if self.pool.ref_cnt[block] == 0 and block < self.pool.num_blocks:
            self.pool.stack.judge_again(block, self.pool.index.chain_hash[block])

    # Where blocks stand once a row releases them.

    def place_blocks(self, row: i64, tables: list[GroupTable]) -> None:
        """Record the nodes of all blocks of a row that ends. O(blocks)."""
        sequences = self.sequences
        start = row * sequences.width
        self.block_map.set_token_blocks(self.records[row], sequences.blocks, start, sequences.num_blocks[row])
        for table in tables:
            self.place_group_blocks(row, table, table.num_null[row], table.num_blocks[row])

    def place_group_blocks(self, row: i64, table: GroupTable, first: i64, last: i64) -> None:
        """Record the nodes of the blocks of a layer group at places `first` to `last` of a row."""
        record = self.records[row]
        block_map = self.block_map
        blocks = table.blocks
        start = row * table.width
        span = table.span
        identity = self.pool.index.identity
        node_of = block_map.node_of
        nodes = record.nodes
        keys = record.keys
        tree_keys = self.registry.tree.key
        for place in range(first, min(last, record.num_nodes // span)):
            block = i64(blocks[start + place])
            node = nodes[(place + 1) * span - 1]
            is_new = block != NULL_BLOCK and node_of[block] != node and identity[2 * block] != NO_CONTENT
            if is_new and tree_keys[node] == keys[(place + 1) * span - 1]:
                block_map.add_block(block, node, table.number)

    def end(self, row: i64, last: i64, has_short_output: bool) -> None:
        """End the record of a row. Its checkpoints count as used now, the longest prefix first.

        Args:
            row: row of the sequence.
            last: the last checkpoint position of its prompt.
            has_short_output: whether its output ends before the next one, so that it ends at `last` too.
        """
        registry = self.registry
        ends = [(int(registry.get(number).position), number) for number in self._taken[row]]
        taken = [number for _, number in sorted(ends, reverse=True)]
        for number in taken if has_short_output else self._nothing:
            checkpoint = registry.get(number)
            if checkpoint.position == last and checkpoint.kind == PROMPT_END and checkpoint.num_hits == 0:
                registry.set_kind(number, OUTPUT_END)
        tag = self.sequences.session[row]
        sessions = self.pool.stack.sessions
        slot = sessions.slot_of(tag)
        if slot >= 0:
            registry.end_request(self.records[row], taken, sessions.number(slot), sessions.is_over(slot))
        else:
            registry.end_request(self.records[row], taken, NO_SESSION if tag == UNDONE else SHARED)
