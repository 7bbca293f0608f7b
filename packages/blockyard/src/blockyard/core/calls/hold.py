"""`hold_cached`: a lease on the blocks that a prompt would hit."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import OutOfBlocks
from ..arrays import zeros_i32
from ..blocks.lease import BlockLease
from ..index.prompt import Hit, Prompt
from ..parts import Parts


class HoldCalls:
    """Looks prompts up like `allocate`, and holds their hits by leases."""

    def __init__(self, parts: Parts) -> None:
        self.interruption = parts.gate.interruption
        self.store = parts.store
        self.leases = parts.leases
        self.token_blocks = parts.token_blocks

    def hold_cached(self, prompt: Prompt, holder: str) -> BlockLease:
        """Hold the full, computed blocks that a prompt would hit, all of the prompt included."""
        index = self.token_blocks.index
        root = index.known_root(prompt.keys)
        hit = Hit(root, index.find_under(root, prompt, prompt.num_tokens // i64(self.token_blocks.block_size)))
        self.store.limit(hit)
        hit.num_usable = min(hit.num_usable, hit.first_pending)
        blocks, token_blocks = self._taken(hit), hit.blocks[: hit.num_usable]
        self._require_room(prompt, blocks)
        self.leases.ledger.act("hold_cached", holder)
        lease = self.leases.hold(blocks, holder, self.interruption)
        if self.token_blocks is not self.leases.ledger:
            # Without their token blocks, no prompt would find them.
            self.token_blocks.share(hit.blocks, 0, hit.num_usable)
            lease._token_blocks = token_blocks
        return lease

    def _require_room(self, prompt: Prompt, blocks: vec[i32]) -> None:
        """Raise `OutOfBlocks` if the lease would break a tenant's limit or guarantee."""
        ledger = self.leases.ledger
        slot = ledger.budget.tenant_of(prompt.keys)
        idle, room = ledger.count_idle(blocks, i64(len(blocks))), ledger.room(slot)
        if idle > room:
            raise OutOfBlocks(
                f"hold_cached needs {idle} idle blocks; {ledger.budget.limits(slot, ledger.queue.num_free)}",
                int(idle),
                max(int(room), 0),
            )

    def _taken(self, hit: Hit) -> vec[i32]:
        """Return the blocks of a hit that are in the pool. Blocks of the CPU pool, which are negative, are left out."""
        taken = [block for block in self.store.taken_by(hit) if block > 0]
        blocks = zeros_i32(len(taken))
        for position in range(i64(len(taken))):
            block = i64(taken[position])
            blocks[position] = i32(block)
        return blocks
