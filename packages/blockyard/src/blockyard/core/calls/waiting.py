"""Lookups for waiting requests, in a manager."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..index.prompt import Hit, Prompt, make_prompt
from ..parts import Parts
from ..waiting.lookups import Lookups, distinct
from ..waiting.room import KeptBlocks
from .allocate import AllocateCalls


class ManagerLookups(Lookups):
    """Answers as `allocate` would."""

    def __init__(self, parts: Parts, calls: AllocateCalls) -> None:
        super().__init__(parts.token_blocks.index, parts.kv_pool, int(parts.block_size))
        self._calls = calls
        self._sequences = parts.sequences
        self._store = parts.store
        self._max_model_len: i64 = parts.config.max_model_len
        self.is_exact = parts.grouped is None and not parts.config.partial_hits
        self.most_inside = self.block_size - 1 if parts.config.partial_hits else i64(0)

    def prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        return make_prompt(token_ids, extra_keys, int(self.block_size))

    def version(self) -> i64:
        return self._sequences.version

    def find(self, prompt: Prompt, num_seqs: i64) -> Hit:
        return self._calls.find_hit(prompt, num_seqs)

    def num_blocks(self, num_tokens: i64) -> i64:
        return self._store.num_least(min(num_tokens, self._max_model_len))

    def num_taken(self, prompt: Prompt, num_seqs: i64, kept: KeptBlocks) -> i64:
        hit = self.find(prompt, num_seqs)
        taken = self._store.num_needed(hit, prompt.num_tokens)
        for block in self._store.taken_by(hit):
            if block > 0 and kept.is_idle(block):
                taken -= 1
        return taken

    def blocks_of(self, blocks: object) -> vec[i32]:
        row = self._sequences.row_of(blocks)
        found: list[int] = []
        for table in self._store.tables:
            found += [int(block) for block in table.row_blocks(row)]
        return distinct(found)
