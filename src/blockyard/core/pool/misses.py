"""What a prompt asked for and did not find, told to policies that account for it."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import zeros_i64
from ..index.hashing import root_hash
from ..index.prompt import Prompt
from .ledger import BlockLedger


def note_misses(ledger: BlockLedger, prompt: Prompt, hit: vec[i32], found: i64) -> None:
    """Tell a policy that wants to know it what a prompt asks for behind the `found` blocks that it hit. O(tokens)."""
    note_missed_keys(ledger, missed_keys(ledger, prompt, hit, found))


def missed_keys(ledger: BlockLedger, prompt: Prompt, hit: vec[i32], found: i64) -> vec[i64]:
    """The keys of what a prompt asks for behind the blocks that it hit; none where no policy wants to know them.

    Not the block with the last token, which is never hit, and nothing behind the next span: that is named by
    contents that are not there.
    """
    last = min((prompt.num_tokens - 1) // ledger.block_size, prompt.next_span_block(found))
    stack = ledger.stack
    if stack is None or not stack.needs_paths or found >= last or found in prompt.spans:
        return zeros_i64(0)
    index = ledger.index
    chain = index.chain_hash[i64(hit[found - 1])] if found > 0 else root_hash(index.root(prompt.keys))
    index.hash_run(prompt.words, found, last, chain)
    return index.hashes[found:last]


def note_missed_keys(ledger: BlockLedger, keys: vec[i64]) -> None:
    """Tell the policy what was asked for and is not there."""
    stack = ledger.stack
    if stack is not None:
        for position in range(i64(len(keys))):
            stack.miss(keys[position])
