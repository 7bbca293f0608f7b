"""The objects that make up a cache."""

from mypy_extensions import i64

from ..config import CacheConfig
from ..hash_seeds import hash_seed_or_drawn
from ..tenants import tenant_groups
from .blocks.budget_watch import BudgetWatch
from .blocks.fence import StepFence
from .blocks.lease import LeaseRegistry
from .blocks.ledger import BlockLedger
from .blocks.observer import Clock
from .budget import SharedBudget
from .gate import Gate
from .index.continuations import Continuations
from .pools.lease_pool import LeasePool
from .sequences.joins import Joins
from .sequences.open_steps import OpenSteps
from .sequences.table import SequenceTable
from .store.base import Store
from .store.event_reader import EventReader
from .store.grouped import GroupedStore, num_token_blocks
from .store.hybrid import HybridStore
from .store.plain import PlainStore
from .watch.history import AllocationHistory
from .watch.misses import Misses, MissLog
from .watch.residency import ResidencySampler


class Parts:
    """The pools, sequences, store and observers of a cache, made from its config.

    Args:
        config: options of the cache.

    Attributes:
        token_blocks: blocks in the rows of sequences, which prompts hit.
        kv_pool: blocks that have keys and values; in a plain store the same.
        pool: public pool of `kv_pool`.
        cpu_pool: public CPU pool, or None.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.gate = Gate()
        self.block_size: i64 = config.hash_block_size
        seed = hash_seed_or_drawn(config.hash_seed)
        size = config.hash_block_size
        # The kind of the cache is only read here; the calls ask the store.
        is_grouped = config.is_mapped
        blocks = num_token_blocks(config) if is_grouped else config.num_blocks
        self.token_blocks = BlockLedger(blocks, size, size, config.enable_prefix_caching, seed)
        self.sequences = SequenceTable(config.max_num_seqs, config.max_blocks_per_seq, size)
        self.joins = Joins(self.sequences, self.token_blocks)
        self.hybrid: HybridStore | None = None
        self.grouped: GroupedStore | None = None
        if config.has_states:
            self.hybrid = HybridStore(config, self.token_blocks, self.sequences, seed)
            self.grouped = self.hybrid
        elif is_grouped:
            self.grouped = GroupedStore(config, self.token_blocks, self.sequences, seed)
        self.store: Store = self.grouped or PlainStore(self.token_blocks, self.sequences, self.joins)
        #: Checkpoints and working states; None in a cache without states.
        self.states = None if self.hybrid is None else self.hybrid.states
        self.kv_pool: BlockLedger = self.store.kv_pool
        if config.tenants:
            self._share_pool()
        #: The blocks that each tenant may take of the KV pool.
        self.budget = self.kv_pool.budget
        if config.max_steps_in_flight > 1:
            self.kv_pool.fence = StepFence(config.max_num_seqs, config.max_steps_in_flight, config.num_blocks)
            self.sequences.open_steps = OpenSteps(config.max_num_seqs, config.max_steps_in_flight)
        self.clock = Clock()
        # Made by functions: a type checker would take an attribute assigned None here as always None.
        self.history = self._make_history()
        self.residency = self._make_residency()
        self.misses = self._make_misses()
        if config.partial_hits:
            self.token_blocks.index.continuations = Continuations(self.token_blocks.num_blocks)
        self.events: EventReader | None = None
        if config.observe.enable_kv_cache_events:
            self.events = EventReader(self.token_blocks, self.store.pools, len(config.layer_groups))
        self.leases = LeaseRegistry(self.kv_pool)
        if is_grouped:
            self.leases.token_blocks = self.token_blocks
        self.pool = LeasePool(self.leases, self.gate, self.history)
        cpu = self.store.cpu_pool
        self.cpu_pool = None if cpu is None else LeasePool(LeaseRegistry(cpu), self.gate, None)

    def _share_pool(self) -> None:
        config = self.config
        budget = SharedBudget(tenant_groups(config.tenants), config.num_blocks, config.max_num_seqs)
        self.kv_pool.budget = budget
        self.kv_pool.watch(BudgetWatch(self.kv_pool, budget))

    def _make_history(self) -> AllocationHistory | None:
        if self.config.observe.history_size == 0:
            return None
        history = AllocationHistory(self.config.observe.history_size, self.kv_pool.queue, self.clock)
        self.kv_pool.watch(history)
        return history

    def _make_residency(self) -> ResidencySampler | None:
        if self.config.observe.residency_sample == 0:
            return None
        residency = ResidencySampler(self.config.observe.residency_sample, self.clock, self.config.num_blocks)
        self.kv_pool.watch(residency)
        return residency

    def _make_misses(self) -> Misses:
        if not self.config.observe.track_misses:
            return Misses()
        config = self.config
        misses = MissLog(self.token_blocks.index, config.num_blocks, config.hash_block_size, config.max_num_seqs)
        self.store.watch_misses(misses)
        return misses
