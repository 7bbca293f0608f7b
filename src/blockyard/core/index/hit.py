"""What a lookup found for a prompt: a value that is handed on, so that a prompt is looked up once."""

from librt.vecs import vec
from mypy_extensions import i32, i64


class Hit:
    """The cached beginning of a prompt. It holds nothing: it is true until the cache changes.

    root: what stands before the prompt's first block (`PrefixIndex.root`); 0 while nothing was cached under its keys.
    blocks: ids of the leading blocks that the index knows, as `PrefixIndex.find_under` returned them.
    num_usable: how many of them can be taken: computed ones and those of one owner (`joins`), or, with layer groups,
        those of which every group has its blocks (`store.grouped`).
    num_known: how many of them count as cached where a miss is explained; what is behind is looked for in evictions.
    first_pending: the first of them that is still being computed; `num_usable` where none is.
    places: with layer groups, for each group a block at each place, minus a CPU block, or 0 for none.
    state: with a state group, the blocks of the state at the end of the hit, which the first step loads.
    num_served: how many of the blocks could be taken if there were a state behind each; `num_usable` without a group.
    sources, num_alike: where the hit goes on inside the next block: blocks, one for each group, that begin with the
        same `num_alike` tokens.
    """

    def __init__(self, root: i64, blocks: vec[i32]) -> None:
        num_found: i64 = len(blocks)
        self.root = root
        self.blocks = blocks
        self.num_usable = num_found
        self.num_known = num_found
        self.first_pending = num_found
        self.places: list[vec[i64]] = []
        self.state: list[int] = []
        self.num_served: i64 = 0
        self.sources: list[int] = []
        self.num_alike: i64 = 0
