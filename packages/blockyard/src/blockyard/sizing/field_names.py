"""Which config fields may change the cache, judged by the words in their names.

A config has dozens of fields, and publishers add more. A field that a family does not read matters only if its name is
about attention, states or layers. Such a field is rejected unless its family lists it as harmless, so an unknown field
causes an error and never a wrong number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


#: A field with one of these words may change the cache.
_CACHE_WORDS = _set("""
cache cca cla compress compressed compression compressor conv conv1d convs cross cycles delta gdn gqa head headdim heads
hybrid index indexer kda kv kvs latent loop loops lru mamba mem memory mha mla mqa recurrence recurrent repeat retention
reuse rwkv shortconv sliding sparse ssm state states swa window windows yoco
""")
#: A field with one of these words may change the cache, unless it also has a word of `_OTHER_WORDS`.
_LAYER_WORDS = _set("""
attention attentions attn block blocks chunk chunked d depth dim dims expand full global group groups hidden interval
key keys kernel layer layers linear local lora mixer n nope num pattern period qk qkv query rank share shared size skip
stride type types value values width
""")
#: Words of experts, normalisation, positions, vocabularies, training, images and sound, none of which is cached.
_OTHER_WORDS = _set("""
act activation activations adapter audio bias biases cap capping decay dense drop dropout dropped droppath emb embd
embed embedding embeddings eps epsilon expert experts ffn final fp32 image images init initializer intermediate label
labels layerdrop layernorm logit logits loss mlp moe mtp multiplier multipliers mup nextn noise norm norms pdrop
position positions probs quant quantization residual rms rope rotary routed router routing scale scaled scaling softcap
softcapping softmax speech std summary temperature theta token topk tuning video vision vocab vocabulary
""")
#: Prefixes of fields of parts that keep nothing between steps.
_OTHER_PARTS = ("moe_", "mtp_", "patch_")
#: Fields with suspicious words that are harmless in every model.
_HARMLESS = _set("""
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled
attention_output_gate attn_implementation attn_output_gate cache_implementation
chunk_size_feed_forward clip_qkv decoder_sparse_step diversity_penalty encoder_no_repeat_ngram_size ep_size
first_k_dense_replace gradient_checkpointing_kwargs hidden_act hidden_activation hidden_size_per_layer_input is_decoder
key_multiplier length_penalty lm_head_bias lm_head_multiplier mamba_ssm_cache_dtype mamba_ssm_dtype mlp_only_layers
model_parallel_size model_type mtp_layer_types n_group no_repeat_ngram_size num_beam_groups num_beams num_expert_group
num_labels num_logits_to_keep num_mtp_layers num_mtp_modules num_nextn_predict_layers num_return_sequences
output_gate_type problem_type q_lora_rank qk_layernorm qkv_bias query_pre_attn_scalar swiglu_limits_shared tie_lm_head
tokenizer_class topk_group torch_dtype tp_size type_vocab_size use_cache use_cache_kernel use_cache_quantization
use_flash_attention use_flash_attn use_logn_attn use_mamba_kernels use_qk_norm use_qkv_bias value_multiplier vocab_size
query_num chunk_input
""")


def can_change_cache(name: str) -> bool:
    """Return whether a field of this name may change the size of a layer's cache. O(length of the name)."""
    if name in _HARMLESS or name.startswith(_OTHER_PARTS):
        return False
    name = name.lstrip("_")
    words = set(re.findall(r"[a-z]+|[a-z0-9]+", name.lower())) | set(name.lower().split("_"))
    return bool(words & _CACHE_WORDS) or bool(words & _LAYER_WORDS and not words & _OTHER_WORDS)


def is_off(value: object) -> bool:
    """Return whether a field's value turns its feature off: null, false, or empty."""
    return value is None or value is False or (isinstance(value, (str, list, tuple, Mapping)) and len(value) == 0)
