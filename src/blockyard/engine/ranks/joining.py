"""From a whole model to a rank's share of it, compared with the whole before anything is served."""

from __future__ import annotations

from dataclasses import replace

from ...errors import ModelError
from ...sizing import Shard
from ...storage.context_shards import ContextShard
from ..attention.context import ContextRank
from ..borrowing import BorrowedModel
from ..checks.trial import OWN_LENGTH, can_afford, require_equal_logits, run_steps
from ..probe import learn_shape
from ..shape import ModelShape
from .group import RankGroup
from .sharding import Heads, ModelShard


def join(
    borrowed: BorrowedModel, shape: ModelShape, shard: Shard, interleave: int, group: RankGroup, is_tried: bool
) -> tuple[BorrowedModel, ModelShape]:
    """This rank's share of a model, and its shape. All ranks call it at the same time.

    interleave: 0 where ranks share heads and features; else they share tokens, as many neighbouring ones at a time, and
    each has the whole model. is_tried: whether the logits of the ranks' steps are compared with the whole model's, on
    rank 0. Raises `ModelError` for a model that cannot be split, or computes something else when it is;
    `InvalidArgument` for more ranks than attention heads.
    """
    if interleave:
        context = ContextRank(ContextShard(shard.rank, shard.size, interleave), group)
        own, own_shape = borrowed, replace(shape, context=context)
    else:
        own, own_shape = _split(borrowed, shape, shard, group)
    if is_tried and shard.rank == 0:
        require_equal_logits(own, own_shape, OWN_LENGTH, (borrowed, shape))
    elif is_tried:
        run_steps(own, own_shape, OWN_LENGTH)
    return own, own_shape


def _split(
    borrowed: BorrowedModel, shape: ModelShape, shard: Shard, group: RankGroup
) -> tuple[BorrowedModel, ModelShape]:
    """A rank's heads and features."""
    split = ModelShard(borrowed.model, Heads.of(borrowed.model, shape.num_kv_heads), shard, group)
    own = BorrowedModel(split.model)
    own_shape = replace(shape, shard=shard if split.has_own_heads else None)
    seen = learn_shape(own, shape.max_model_len)
    num_expected = len(own_shape.kv_heads)
    if replace(seen, num_kv_heads=shape.num_kv_heads) != shape or seen.num_kv_heads != num_expected:
        raise ModelError(
            f"{type(borrowed.model).__name__} cannot be split over ranks: rank {shard.rank} computes "
            f"{seen.num_kv_heads} heads of keys instead of {num_expected}"
        )
    return own, own_shape


def is_affordable(borrowed: BorrowedModel) -> bool:
    """Whether the whole model can be compared with, in seconds."""
    return can_afford(borrowed, OWN_LENGTH)
