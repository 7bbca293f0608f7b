"""A trial: the logits of an engine's steps against the model's own, made in one forward pass of whole prompts.

Three prompts of equal length. The first is computed in two chunks and a decode, the second begins as the first does and
takes that from the cache, the third is computed beside them in pieces. So every way in which a step cuts sequences is
compared: whole, chunks, decodes, a batch, a prefix hit.
"""

from __future__ import annotations

import numpy as np
import torch

from ...core.manager import KVCacheManager
from ...errors import ModelError
from ...storage import KVCache
from ..attention.latent import LATENT
from ..borrowing import BorrowedModel
from ..moves import MoveQueue
from ..runner import ForwardBatch, ModelRunner
from ..shape import ModelShape
from .small import SMALL_WINDOW

#: Tokens of a prompt in the trial of a small copy, whose windows it outgrows, and of the model itself.
SMALL_LENGTH = 3 * SMALL_WINDOW + 2
OWN_LENGTH = 16
_BLOCK_SIZE = 4
#: Parameters times tokens that a CPU computes in a few seconds.
_AFFORDABLE = 2**36
#: The largest difference of logits, in parts of their size: at any token in float32, at half of all in other types.
#: Rounding makes 1e-5 of it in float32, and some hundredths in 16 bits.
_MAX_ERROR = 1e-3
_MAX_ERROR_16_BITS = 0.2


def can_afford(borrowed: BorrowedModel, length: int) -> bool:
    """Whether a trial on prompts of `length` tokens takes seconds at most."""
    num_parameters: int = borrowed.model.num_parameters()
    num_tokens = 6 * length  # three prompts, by the model and by the engine
    return borrowed.device.type != "cpu" or num_parameters * num_tokens <= _AFFORDABLE


def require_equal_logits(
    borrowed: BorrowedModel,
    shape: ModelShape,
    length: int,
    judge: tuple[BorrowedModel, ModelShape] | None = None,
) -> None:
    """Raise `ModelError` if the engine's steps and the model's own forward disagree on prompts of `length` tokens.

    length: at least 16. judge: whose own forward is compared, if not this model's. Four forward passes of at most 3 *
    length tokens.
    """
    prompts = _prompts(length, shape.vocab_size)
    errors = _errors(own_logits(*(judge or (borrowed, shape)), prompts), run_steps(borrowed, shape, length))
    is_exact = borrowed.dtype == torch.float32
    worst = errors.max() if is_exact else errors.median()
    if not worst <= (_MAX_ERROR if is_exact else _MAX_ERROR_16_BITS):
        row, token = divmod(int(errors.argmax()), length)
        raise ModelError(
            f"{type(borrowed.model).__name__} computes other logits in the engine's steps than in its own forward (by "
            f"{float(errors[row, token]):.1g} of their size, at token {token} {_CUTS[row]}): its layers keep or "
            f"compute something that the engine does not know"
        )


_CUTS = ("of a prompt in chunks", "of a prompt behind a prefix hit", "of a prompt in a batch")


def run_steps(borrowed: BorrowedModel, shape: ModelShape, length: int) -> torch.Tensor:
    """The engine's side of it: logits (prompts, tokens, vocabulary)."""
    return _Steps(borrowed, shape, _prompts(length, shape.vocab_size)).logits()


def own_logits(borrowed: BorrowedModel, shape: ModelShape, prompts: torch.Tensor) -> torch.Tensor:
    """The model's own logits, (prompts, tokens, vocabulary): its own attention, whole prompts, no cache.

    Where its attention asks for extras, it is the eager one: transformers' others silently leave some of them out.
    """
    model = borrowed.model
    chosen = model.config._attn_implementation
    if shape.extras - {LATENT}:
        model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=prompts.to(borrowed.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(chosen)
    return logits


def _prompts(length: int, vocab_size: int) -> torch.Tensor:
    """Three random prompts, (3, length); the first two share their first half, in whole blocks."""
    rng = np.random.default_rng(length)
    prompts = rng.integers(0, vocab_size, (3, length))
    shared = length // 2 // _BLOCK_SIZE * _BLOCK_SIZE
    prompts[1, :shared] = prompts[0, :shared]
    prompts[1, shared] = (prompts[0, shared] + 1) % vocab_size
    return torch.from_numpy(prompts)


def _errors(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How much the logits behind each token differ, in parts of their spread: (prompts, tokens)."""
    own, other = own.float(), other.float()
    spread = own.std(dim=-1).mean().clamp_min(1e-30)
    return (own - other).square().mean(dim=-1).sqrt() / spread


class _Steps:
    """Three prompts run as an engine runs them, over a manager and tensors of its own."""

    def __init__(self, borrowed: BorrowedModel, shape: ModelShape, prompts: torch.Tensor) -> None:
        block_size = _BLOCK_SIZE * (1 if shape.context is None else shape.context.interleave)
        spec = shape.spec(block_size, borrowed.dtype)
        self._tokens: list[list[int]] = prompts.tolist()
        self._length = prompts.shape[1]
        num_blocks = 4 * (self._length // _BLOCK_SIZE + 2) * len(spec.groups)
        config = spec.cache_config(num_blocks, max_num_seqs=3, max_model_len=self._length)
        self._cache = KVCacheManager(config)
        self._kv_cache = KVCache(num_blocks, block_size, **shape.tensors(spec, borrowed.dtype, borrowed.device))
        self._runner = ModelRunner(borrowed, self._kv_cache, shape, "sdpa")
        self._rows: dict[int, int] = {}
        self._logits: list[list[torch.Tensor]] = [[], [], []]

    def logits(self) -> torch.Tensor:
        """Logits behind every token, (3, tokens, vocabulary); of those that came from the cache, the first prompt's."""
        length, cut = self._length, self._length * 2 // 5
        first, third = self._start(0), self._start(2)
        self._step({first: cut, third: length // 4})
        self._step({first: length - 1 - cut, third: 1})
        second = self._start(1)
        num_cached = self._cache.num_computed_tokens(second)
        self._logits[1].append(torch.cat(self._logits[0])[:num_cached])
        self._step({seq: length - self._cache.num_computed_tokens(seq) for seq in (first, second, third)})
        return torch.stack([torch.cat(parts) for parts in self._logits])

    def _start(self, row: int) -> int:
        seq = self._cache.allocate(self._tokens[row], holder="trial")
        self._rows[seq] = row
        return seq

    def _step(self, counts: dict[int, int]) -> None:
        """Compute that number of further tokens of each sequence."""
        seqs, num_new = list(counts), list(counts.values())
        plan = self._cache.reserve(seqs, num_new)
        moves = MoveQueue()
        moves.note(plan)
        batch = ForwardBatch.of(plan, self._cache.config.layer_groups, num_new)
        logits = self._runner.run(batch, moves).split(num_new)
        self._cache.commit(seqs, num_new, [-1] * len(seqs))
        for seq, part in zip(seqs, logits, strict=True):
            self._logits[self._rows[seq]].append(part)
