"""A block as shown to callers."""


class KVCacheBlock:
    """What is known of one block at the moment it was asked for. A copy: it does not follow later changes.

    block_id: the block's address in the KV tensors.
    ref_cnt: how many sequences and leases hold it.
    token_ids: the tokens whose keys and values it is cached for; empty if it is not, where they are forgotten,
        and of a block of several token blocks that a span begins in.
    num_tokens: known tokens that it holds, of a partly filled one too; 0 where that is not known (a bare lease).
    group: the layer group that it holds them for; None if it holds none.
    block_hash: the index's internal hash of its tokens and all before them, None if not cached.
    is_computed: False while a sequence has yet to compute what the index says it holds.
    holders: names of the sequences and leases that hold it.
    is_null: True for block 0.
    """

    def __init__(
        self,
        block_id: int,
        ref_cnt: int,
        token_ids: list[int],
        block_hash: int | None,
        is_computed: bool,
        holders: list[str],
        num_tokens: int = 0,
        group: int | None = None,
    ) -> None:
        self.block_id = block_id
        self.ref_cnt = ref_cnt
        self.token_ids = token_ids
        self.block_hash = block_hash
        self.is_computed = is_computed
        self.holders = holders
        self.num_tokens = num_tokens
        self.group = group

    @property
    def is_null(self) -> bool:
        """Whether this is the placeholder that is never allocated, cached or freed."""
        return self.block_id == 0

    @property
    def is_free(self) -> bool:
        """Whether nothing holds the block, so that the next allocations may take it."""
        return self.ref_cnt == 0 and not self.is_null

    @property
    def is_cached(self) -> bool:
        """Whether a prompt can hit the block."""
        return self.block_hash is not None

    def __reduce__(self) -> tuple[object, ...]:
        """How it is copied and pickled: it is plain data."""
        known = (self.block_id, self.ref_cnt, self.token_ids, self.block_hash, self.is_computed, self.holders)
        return (KVCacheBlock, (*known, self.num_tokens, self.group))

    def __repr__(self) -> str:
        state = "null" if self.is_null else "free" if self.is_free else f"ref_cnt={self.ref_cnt}"
        cached = f" cached={self.token_ids}" if self.is_cached else ""
        held = f" holders={self.holders}" if self.holders else ""
        return f"<KVCacheBlock {self.block_id} {state}{cached}{held}>"
