"""What a prompt asked for and did not find, told to policies that account for it."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..index.hashing import root_hash
from ..index.prompt import Prompt
from .ledger import BlockLedger


def note_misses(ledger: BlockLedger, prompt: Prompt, hit: vec[i32], found: i64) -> None:
    """Tell a policy that wants to know it what a prompt asks for behind the `found` blocks that it hit. O(tokens).

    Not the block with the last token, which is never hit, and nothing behind the next span: that is named by
    contents that are not there.
    """
    chooser = ledger.chooser
    if chooser is None or not chooser.needs_paths:
        return
    last = min((prompt.num_tokens - 1) // ledger.block_size, prompt.next_span_block(found))
    if found >= last or found in prompt.spans:
        return
    index = ledger.index
    chain = index.chain_hash[i64(hit[found - 1])] if found > 0 else root_hash(index.root(prompt.keys))
    index.hash_run(prompt.words, found, last, chain)
    for position in range(found, last):
        chooser.miss(index.hashes[position])
