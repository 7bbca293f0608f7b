"""Compares the logits of an engine's steps with the model's own, from one forward pass of whole prompts.

There are three prompts of equal length. The first is computed in two chunks and a decode, the second shares its
beginning and hits the cache, the third is computed beside them in pieces. This covers whole prompts, chunks, decodes, a
batch and a prefix hit.

The small copy has the model's class and config, with few narrow layers and random weights. Everything that decides how
tokens attend to each other stays: layer types and their order, shared heads, and windows (shortened, so that a short
prompt outgrows them). Everything that only makes a model large is reduced.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from blockyard import KVCacheManager, StateHints
from blockyard.errors import ModelError
from blockyard.storage import KVCache

from ..attention.latent import LATENT
from ..moves import MoveQueue
from ..patching import PatchedModel
from ..runner import ForwardBatch, ModelRunner
from ..shape import KVShape

#: Window of a small copy, and length at which it starts to scale attention, in tokens.
SMALL_WINDOW = 13
_MAX_POSITIONS = 512
_VOCABULARY = 128
_MAX_LAYERS = 8
#: Config fields that only set a size, by the largest value in a small copy.
_SIZES = {
    64: "hidden_size d_model n_embd word_embed_proj_dim embedding_size d_inner",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size expert_ffn_hidden_size decoder_ffn_dim "
    "intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size moe_intermediate_size "
    "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size moe_latent_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads swa_num_attention_heads "
    "num_local_experts num_experts n_routed_experts zero_expert_num linear_num_key_heads "
    "linear_num_value_heads linear_num_heads",
    16: "head_dim global_head_dim swa_head_dim kv_channels qk_nope_head_dim index_head_dim mamba_d_head mamba_head_dim "
    "mamba_headdim linear_head_dim linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input laurel_rank "
    "router_hidden_size adapter_rank query_pre_attn_scalar indexer_head_dim",
    12: "v_head_dim",
    8: "qk_rope_head_dim rotary_dim mamba_d_state ssm_state_size state_size mamba_dt_rank time_step_rank "
    "mamba_n_heads n_mamba_heads mamba_num_heads mamba_chunk_size chunk_size",
    24: "q_lora_rank kv_lora_rank o_lora_rank",
    2: "num_experts_per_tok num_experts_per_token top_k_experts num_kv_shared_layers moe_topk",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers "
    "mamba_n_groups n_groups mamba_ngroups",
    32: "attention_head_dim index_n_heads",  # with few heads, many index keys would tie at score 0
    _VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size mamba_d_ssm attention_hidden_size",
    SMALL_WINDOW: "sliding_window sliding_window_size window_size floor_scale original_max_position_embeddings "
    "initial_context_length index_topk",
    _MAX_POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len",
}
_AT_MOST = {name: size for size, names in _SIZES.items() for name in names.split()}
_ROPE_FIELDS = ("rope_scaling", "rope_parameters")
#: Lower limits that would take effect in small copies.
_LOW = {"time_step_min": 1e-9, "time_step_floor": 1e-9}
#: Fields that follow from others.
_DERIVED = {"qk_head_dim", "quantization_config"}
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "swa_num_key_value_heads")


def small_model(model_class: Any, config: Any) -> Any:
    """Return a model of this class with sharp random weights, in float32 on the CPU. Raises as the class does."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_class(config).float().eval()
    sharpen(model)
    return model


def small_config(config: Any) -> Any:
    """Return the config of a small copy. Raises as its class does if the small sizes do not fit together."""
    return type(config).from_dict(_shrunk(config.to_dict()))


def sharpen(model: Any, seed: int = 0) -> None:
    """Give a model random weights under which every part affects the logits, unlike freshly initialized ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim >= 2:
                weights.normal_(0, 1.5 / math.sqrt(weights.shape[-1]), generator=generator)
            elif "norm" not in name:
                weights.add_(torch.randn(weights.shape, generator=generator) * 0.3)


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config, including nested configs, with the sizes of a small copy."""
    num_layers = next((fields[name] for name in _NUM_LAYERS if isinstance(fields.get(name), int)), 0)
    kept = _kept_layers(fields, num_layers)
    heads = _heads(fields)
    made = {name: _cut(name, value, num_layers, kept) for name, value in fields.items()}
    if fields.get("attn_layer_indices"):
        made["attn_layer_indices"] = [1]
    made.update({name: low for name, low in _LOW.items() if name in fields})
    made.update({name: kept for name in _NUM_LAYERS if isinstance(fields.get(name), int)})
    made.update({name: heads for name in _NUM_KV_HEADS if isinstance(fields.get(name), int)})
    if "qk_rope_head_dim" in fields and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        made["head_dim"] = made["qk_rope_head_dim"]
    return {name: value for name, value in made.items() if name not in _DERIVED}


def _cut(name: str, value: Any, num_layers: int, kept: int) -> Any:
    if isinstance(value, dict):
        return _shrunk_entries(name, value, kept)
    if isinstance(value, (list, tuple)) and num_layers and len(value) == num_layers:
        value = value[:kept]
        return [_cut(name, entry, 0, 0) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool):
        most = _VOCABULARY - 1 if name.endswith("token_id") else _AT_MOST.get(name, value)
        return min(value, most)
    return value


def _shrunk_entries(name: str, entries: dict[str, Any], kept: int) -> dict[str, Any]:
    """Shrink a nested config, a dict of layers that differ, or the lengths at which rotary embeddings start to scale.

    The prompts of a trial are longer than each length at which a model begins to compute differently.
    """
    if name in _ROPE_FIELDS:
        return {
            inner: _cut(name if isinstance(value, dict) else inner, value, 0, 0) for inner, value in entries.items()
        }
    if name == "per_layer_config":
        return {layer: _shrunk(fields) for layer, fields in entries.items() if int(layer) < kept}
    return _shrunk(entries) if name.endswith("_config") else entries


def _kept_layers(fields: dict[str, Any], num_layers: int) -> int:
    """Return the number of first layers that include every layer type, at least two."""
    rows = [value for value in fields.values() if isinstance(value, (list, tuple)) and len(value) == num_layers]
    kinds = [str(kind) for kind in zip(*rows, strict=True)]
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=2)
    for name, value in fields.items():
        if isinstance(value, int) and ("pattern" in name or "interval" in name or "period" in name):
            needed = max(needed, value)
    return min(max(needed, 2), num_layers, _MAX_LAYERS)


def _heads(fields: dict[str, Any]) -> int:
    """Return the KV heads of the small copy: 1 for multi-query attention, 2 for grouped-query, up to 4 otherwise."""
    num_heads = next((fields[name] for name in _NUM_HEADS if isinstance(fields.get(name), int)), 0)
    own = next((fields[name] for name in _NUM_KV_HEADS if isinstance(fields.get(name), int)), num_heads)
    return 1 if own == 1 else min(num_heads, 4) if own == num_heads else 2


#: Tokens of a prompt in the trial of a small copy (longer than its windows), and of the model itself.
SMALL_LENGTH = 3 * SMALL_WINDOW + 2
OWN_LENGTH = 16
_BLOCK_SIZE = 4
#: Maximum checkpoints at a time: at the ends of three prompts and at the requested position.
_MAX_STATES = 8
#: Parameters times tokens that a CPU computes in a few seconds.
_AFFORDABLE = 2**36
#: Largest relative difference of logits: at any token in float32, at half of the tokens in other dtypes.
#: Rounding causes 1e-5 in float32, and a few hundredths in 16 bits.
_MAX_ERROR = 1e-3
_MAX_ERROR_16_BITS = 0.2
#: A model with states may differ by twice its own decoding's difference, up to this limit: transformers' Nemotron-H and
#: Zamba2 limit time steps in chunks but not in single tokens. Small copies do not differ (`_LOW`).
_MAX_STATE_ERROR = 0.05


def can_afford(patched: PatchedModel, length: int) -> bool:
    """Return whether a trial on prompts of `length` tokens takes at most seconds."""
    num_parameters: int = patched.model.num_parameters()
    num_tokens = 6 * length  # three prompts, by the model and by the engine
    return patched.device.type != "cpu" or num_parameters * num_tokens <= _AFFORDABLE


def require_equal_logits(
    patched: PatchedModel,
    shape: KVShape,
    length: int,
    judge: tuple[PatchedModel, KVShape] | None = None,
) -> None:
    """Raise `ModelError` if the engine's steps and the model's own forward disagree on prompts of `length` tokens.

    length is at least 16. The own forward is that of `judge`, if given. Runs four forward passes of at most 3 * length
    tokens.
    """
    prompts = _prompts(length, shape.vocab_size)
    errors = _errors(own_logits(*(judge or (patched, shape)), prompts), run_steps(patched, shape, length))
    is_exact = patched.dtype == torch.float32
    worst = errors.max() if is_exact else errors.median()
    allowed = _MAX_ERROR if is_exact else _MAX_ERROR_16_BITS
    if worst > allowed and shape.states is not None and is_exact:
        allowed = max(allowed, min(2 * float(_own_errors(patched, prompts).max()), _MAX_STATE_ERROR))
    if not worst <= allowed:
        row, token = divmod(int(errors.argmax()), length)
        raise ModelError(
            f"{type(patched.model).__name__} computes other logits in the engine's steps than in its own forward (by "
            f"{float(errors[row, token]):.1g} of their size, at token {token} {_CUTS[row]}): its layers keep or "
            f"compute something that the engine does not support"
        )


_CUTS = ("of a prompt in chunks", "of a prompt after a prefix hit", "of a prompt in a batch")


def run_steps(patched: PatchedModel, shape: KVShape, length: int) -> torch.Tensor:
    """Return the logits of the engine's steps, (prompts, tokens, vocabulary)."""
    return _Steps(patched, shape, _prompts(length, shape.vocab_size)).logits()


def own_logits(patched: PatchedModel, shape: KVShape, prompts: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits of whole prompts, without a cache, (prompts, tokens, vocabulary).

    If its attention has special features, the eager attention is used: the others silently leave some of them out.
    """
    model = patched.model
    chosen = model.config._attn_implementation
    if shape.extras - {LATENT}:
        model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=prompts.to(patched.device), use_cache=False).logits
    finally:
        model.set_attn_implementation(chosen)
    return logits


def _own_errors(patched: PatchedModel, prompts: torch.Tensor) -> torch.Tensor:
    """Return how far a model's own decoding, as by `generate`, differs from its forward of whole prompts."""
    ids, half = prompts.to(patched.device), prompts.shape[1] // 2
    cache = DynamicCache(config=patched.model.config.get_text_config(decoder=True))
    with torch.inference_mode():
        whole = patched.model(input_ids=ids, use_cache=False).logits
        pieces = [ids[:, :half], *ids[:, half:].split(1, dim=1)]
        parts = [patched.model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in pieces]
    return _errors(whole, torch.cat(parts, dim=1))


def _prompts(length: int, vocab_size: int) -> torch.Tensor:
    """Return three random prompts, (3, length); the first two share their first half, in whole blocks."""
    rng = np.random.default_rng(length)
    prompts = rng.integers(0, vocab_size, (3, length))
    shared = _shared_tokens(length)
    prompts[1, :shared] = prompts[0, :shared]
    prompts[1, shared] = (prompts[0, shared] + 1) % vocab_size
    return torch.from_numpy(prompts)


def _shared_tokens(length: int) -> int:
    return length // 2 // _BLOCK_SIZE * _BLOCK_SIZE


def _errors(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how far the logits of each token differ, relative to their spread: (prompts, tokens)."""
    own, other = own.float(), other.float()
    spread = own.std(dim=-1).mean().clamp_min(1e-30)
    return (own - other).square().mean(dim=-1).sqrt() / spread


class _Steps:
    """Runs three prompts as an engine does, with its own manager and tensors."""

    def __init__(self, patched: PatchedModel, shape: KVShape, prompts: torch.Tensor) -> None:
        block_size = _BLOCK_SIZE * (1 if shape.context is None else shape.context.interleave)
        spec = shape.spec(block_size, patched.dtype)
        self._tokens: list[list[int]] = prompts.tolist()
        self._length = prompts.shape[1]
        num_blocks = 4 * (self._length // _BLOCK_SIZE + 2) * len(spec.groups)
        #: Checkpoint position in the first prompt, which the second one hits.
        self._checkpoints: list[int] = []
        if shape.states is not None:
            num_blocks += _MAX_STATES * -(-shape.states.num_bytes // spec.bytes_per_block)
            self._checkpoints = [_shared_tokens(self._length)]
        config = shape.cache_config(spec, num_blocks, max_num_seqs=3, max_model_len=self._length)
        self._cache = KVCacheManager(config)
        self._kv_cache = KVCache(num_blocks, block_size, **shape.tensors(spec, patched.dtype, patched.device))
        self._runner = ModelRunner(patched, self._kv_cache, shape, "sdpa", config.max_num_seqs)
        self._rows: dict[int, int] = {}
        self._logits: list[list[torch.Tensor]] = [[], [], []]

    def logits(self) -> torch.Tensor:
        """Return the logits of every token, (3, tokens, vocabulary); cached tokens get the first prompt's."""
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
        states = StateHints(self._checkpoints) if row == 0 and self._checkpoints else None
        seq = self._cache.allocate(self._tokens[row], holder="trial", states=states)
        self._rows[seq] = row
        return seq

    def _step(self, counts: dict[int, int]) -> None:
        """Compute some further tokens of each sequence, in several steps if a state is checkpointed."""
        while counts:
            seqs = list(counts)
            plan = self._cache.reserve(seqs, list(counts.values()))
            num_new = plan.num_scheduled.tolist()
            moves = MoveQueue()
            moves.note(plan)
            batch = ForwardBatch.of(plan, self._cache.config.layer_groups, num_new)
            logits = self._runner.run(batch, moves).split(num_new)
            self._cache.commit(seqs, num_new, [-1] * len(seqs))
            for seq, part in zip(seqs, logits, strict=True):
                self._logits[self._rows[seq]].append(part)
            left = {seq: counts[seq] - done for seq, done in zip(seqs, num_new, strict=True)}
            counts = {seq: count for seq, count in left.items() if count}
