"""Families of models whose layers keep keys and values alone, in the order of what is special about them."""

from __future__ import annotations

from typing import Any

from . import layer_rules as rules
from .family import PUBLISHER, VLLM, gqa, latent, mha, row, windowed

_GPT_NAMES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
_MPT_NAMES = {"num_hidden_layers": "n_layers", "hidden_size": "d_model", "num_attention_heads": "n_heads"}
#: Fields of latent attention that only its weights depend on.
_LATENT_ONLY = "head_dim num_key_value_heads qk_nope_head_dim qk_head_dim v_head_dim"
_INDEX_ONLY = _LATENT_ONLY + " index_n_heads index_topk"
_INDEXED: dict[str, Any] = {"index_head_dim": 128, "indexer_types": None, "layer_types": None}
_SWITCHED = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": None}

ATTENTION_FAMILIES = (
    # ------------------------------------------------ the same attention in all layers
    row("llama hyperclovax granite deepseek_ocr2_text", gqa(32, 4096, 32)),
    row("apertus flex_olmo granitemoe granitemoeshared olmo olmo2 hunyuan_vl_text aria_text", gqa(32, 4096, 32)),
    row(
        "hunyuan_v1_dense hunyuan_v1_moe hunyuan",
        gqa(32, 4096, 32),
        aliases={"head_dim": "attention_head_dim"},
        harmless="cla_share_factor num_media_embeds vit_type",  # use_cla is refused if it is true
    ),
    row("arcee", gqa(32, 2560, 32)),
    row("bitnet", gqa(30, 2560, 20, 5)),
    row("chameleon", gqa(32, 4096, 32, 32)),
    row("cohere", gqa(40, 8192, 64)),
    row("cosmos3_edge_text", gqa(28, 2048, 16, 8, 128)),
    row("diffllama", gqa(16, 2048, 32)),
    row("emu3_text_model", gqa(32, 4096, 32, 8)),
    row("ernie4_5 paddleocr_vl_text", gqa(18, 1024, 16, 2, 128)),
    row(
        "ernie4_5_moe ernie4_5_vl_moe_text",
        gqa(28, 2560, 20, 4),
        harmless="compression_ratio moe_layer_start_index moe_layer_end_index",
    ),
    row("gemma", gqa(28, 3072, 16, 16, 256), harmless="use_bidirectional_attention"),
    row("glm glm4", gqa(40, 4096, 32, 2, 128)),
    row("glm4v_text", gqa(40, 4096, 32, 2)),
    row("glm4_moe glm4v_moe_text", gqa(46, 4096, 96, 8)),
    row("glm_ocr_text", gqa(16, 1024, 16, 8)),
    row("helium", gqa(24, 2560, 20, 20, 128)),
    row("hy_v3", gqa(80, 4096, 64, 8, 128)),
    row("jais2", gqa(32, 3328, 26)),
    row("nanochat", gqa(12, 768, 6)),
    row("nemotron", gqa(32, 6144, 48)),
    row("olmoe", gqa(16, 2048, 16)),
    row("phi", gqa(24, 2048, 32)),
    row("qwen3_vl_text", gqa(32, 4096, 32, 32, 128)),
    row("qwen3_vl_moe_text", gqa(24, 2048, 16, 16)),
    row("seed_oss", gqa(64, 4096, 80, 8, 128)),
    row("solar_open", gqa(48, 4096, 64, 8, 128)),
    row("stablelm", gqa(32, 2560, 32, 32)),
    row("jetmoe", gqa(12, 2048, None, 16, 128), aliases={"head_dim": "kv_channels"}, fixed={"query_heads": False}),
    # ------------------------------------------------ as many KV heads as query heads, or one
    row("opt", mha(12, 768, 12)),
    row("persimmon", mha(36, 4096, 64)),
    row("gpt_neox", mha(44, 6144, 64)),
    row("gpt_neox_japanese", mha(32, 2560, 32)),
    row("bloom", mha(2, 64, 8), aliases={**_GPT_NAMES, "hidden_size": "n_embed"}),
    row("codegen gptj", mha(28, 4096, 16), aliases=_GPT_NAMES, harmless="n_ctx n_inner"),
    row("ctrl", mha(48, 1280, 16), aliases=_GPT_NAMES, harmless="dff n_ctx"),
    row("gpt2", mha(12, 768, 12), aliases=_GPT_NAMES, harmless="n_ctx n_inner"),
    row(
        "xglm",
        mha(24, 1024, 16),
        aliases={"num_hidden_layers": "num_layers", "hidden_size": "d_model", "num_attention_heads": "attention_heads"},
    ),
    row(
        "gpt_neo",
        mha(24, 2048, 16, attention_types=[[["global", "local"], 12]], attention_layers=None),
        rules.local_and_global,
        aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
        harmless="window_size",
    ),
    row(
        "gpt_bigcode",
        mha(12, 768, 12, multi_query=True),
        aliases=_GPT_NAMES,
        harmless="n_ctx n_inner num_key_value_heads",
    ),
    row(
        "falcon RefinedWeb RefinedWebModel",
        mha(32, 4544, 71, multi_query=True, new_decoder_architecture=False, num_kv_heads=None),
        aliases={**_GPT_NAMES, "num_kv_heads": "n_head_kv"},
        harmless="parallel_attn num_ln_in_parallel_attn",
    ),
    row("dbrx", mha(24, 2048, 16, attn_config={"kv_n_heads": 1}), aliases=_MPT_NAMES, harmless="num_key_value_heads"),
    row("mpt", mha(24, 2048, 16, attn_config={}), aliases=_MPT_NAMES),
    row(
        "bert camembert data2vec-text ernie roberta roberta-prelayernorm roc_bert roformer xlm-roberta",
        mha(12, 768, 12, is_decoder=False),
    ),
    row("bert-generation biogpt megatron-bert", mha(24, 1024, 16, is_decoder=False)),
    row("electra", mha(12, 256, 4, is_decoder=False)),
    row("rembert", mha(32, 1152, 18, is_decoder=False)),
    row("xlm-roberta-xl", mha(36, 2560, 32, is_decoder=False)),
    # ------------------------------------------------ windows in all layers, or in none
    row("mistral", gqa(32, 4096, 32, 8, sliding_window=4096), rules.all_slide),
    row("ministral3", gqa(34, 4096, 32, 8, 128, sliding_window=None), rules.all_slide),
    row("mixtral phimoe", gqa(32, 4096, 32, 8, sliding_window=None), rules.all_slide),
    row("phi3", gqa(32, 3072, 32, sliding_window=None), rules.all_slide, harmless="full_attn_mod"),
    row(
        "phi4_multimodal phi4mm",
        gqa(32, 3072, 32, 8, sliding_window=None),
        rules.all_slide,
        harmless="full_attn_mod speech_lora",
    ),
    row("qwen3_omni_moe_text", gqa(28, 2048, 28, 4, sliding_window=None), rules.all_slide),
    row("starcoder2", gqa(30, 3072, 24, 2, sliding_window=None), rules.all_slide),
    row("doge", gqa(32, 1024, 8, sliding_window=None), rules.all_slide, harmless="keep_window_size"),
    row("voxtral_realtime_text", gqa(32, 4096, 32, 8, sliding_window=4096), rules.all_slide),
    row("qwen3_moe", gqa(24, 2048, 32, 4, **_SWITCHED), rules.all_slide, harmless="max_window_layers"),
    # ------------------------------------------------ windows in some layers
    row("qwen2", gqa(32, 4096, 32, 32, max_window_layers=28, **_SWITCHED), rules.last_slide),
    row(
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
        gqa(80, 8192, 64, 8, max_window_layers=80, **_SWITCHED),
        rules.last_slide,
    ),
    row("qwen2_5_omni_text", gqa(28, 3584, 28, 4, max_window_layers=28, **_SWITCHED), rules.last_slide),
    row("qwen3", gqa(32, 4096, 32, 32, 128, max_window_layers=28, **_SWITCHED), rules.last_slide),
    row("qwen2_moe", gqa(24, 2048, 16, 16, max_window_layers=28, **_SWITCHED), rules.alternate_when_on),
    row("dots1", windowed(gqa(62, 4608, 32, 32), 4096, max_window_layers=62), rules.windows_from("max_window_layers")),
    row(
        "afmoe",
        windowed(gqa(32, 2048, 16, None, 128), 1024, global_attn_every_n_layers=None),
        rules.last_of(4, "global_attn_every_n_layers"),
    ),
    row(
        "cohere2",
        windowed(gqa(40, 8192, 64), 4096, sliding_window_pattern=None),
        rules.last_of(4),
        aliases={"sliding_window_pattern": "layer_switch"},
        harmless="order_of_interleaved_layers use_parallel_block",
    ),
    row(
        "cohere2_moe",
        windowed(
            gqa(40, 8192, 64, None, 128),
            4096,
            sliding_window_pattern=4,
            prefix_dense_sliding_window_pattern=1,
            first_k_dense_replace=0,
        ),
        rules.prefixed,
    ),
    row("cwm", windowed(gqa(64, 6144, 48, 8, 128), 8192), rules.first_of(4)),
    row("exaone4 exaone_moe", windowed(gqa(32, 4096, 32, 32), 4096, sliding_window_pattern=4), rules.last_of(4)),
    row("gemma2 vaultgemma", windowed(gqa(26, 2304, 8, 4, 256), 4096), rules.last_of(2)),
    row(
        "gemma3_text",
        windowed(gqa(26, 2304, 8, 4, 256), 4096, sliding_window_pattern=None, use_bidirectional_attention=False),
        rules.last_of(6),
        aliases={"sliding_window_pattern": "_sliding_window_pattern"},
    ),
    row(
        "gemma3n_text",
        windowed(gqa(35, 2048, 8, 2, 256), 512, num_kv_shared_layers=15),
        rules.last_of(5),
        harmless="activation_sparsity_pattern altup_num_inputs altup_active_idx laurel_rank",
    ),
    row(
        "gemma4_text",
        windowed(
            gqa(30, 2304, 8, 4, 256),
            512,
            num_kv_shared_layers=0,
            global_head_dim=512,
            num_global_key_value_heads=None,
            attention_k_eq_v=False,
            use_bidirectional_attention=None,
        ),
        rules.last_of(6, ends_full=True),
        harmless="expert_intermediate_size",
    ),
    row(
        "gemma4_unified_text",
        windowed(
            gqa(30, 2304, 8, 4, 256),
            1024,
            num_kv_shared_layers=0,
            global_head_dim=512,
            num_global_key_value_heads=None,
            attention_k_eq_v=False,
            use_bidirectional_attention=None,
        ),
        rules.last_of(6, ends_full=True),
    ),
    row("gpt_oss", windowed(gqa(36, 2880, 64, 8, 64), 128), rules.last_of(2), fixed={"dtype": "bfloat16"}),
    row("granite_swa", windowed(gqa(24, 2560, 20, 4), 128), rules.first_of(4)),
    row("granitemoe_swa", windowed(gqa(32, 4096, 32), 128), rules.first_of(4)),
    row("laguna", windowed(gqa(40, 2048, 48, 8, 128), 512), harmless="num_attention_heads_per_layer"),
    row(
        "llama4_text",
        gqa(
            48,
            5120,
            40,
            8,
            128,
            attention_chunk_size=8192,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            layer_types=None,
        ),
        rules.chunks,
    ),
    row("mellum", windowed(gqa(28, 2304, 32, 4, 128), 1024)),
    row(
        "mimo_v2_flash mimo_v2",
        windowed(
            gqa(48, 4096, 64, 4, 192),
            128,
            v_head_dim=128,
            hybrid_layer_pattern=None,
            swa_num_key_value_heads=None,
            swa_head_dim=None,
            swa_v_head_dim=None,
        ),
        rules.first_and_every(6),
        fixed={"sliding_kv_heads": 2},
        harmless="add_full_attention_sink_bias add_swa_attention_sink_bias "
        "attention_chunk_size attention_projection_layout hybrid_block_size "
        "sliding_window_size swa_num_attention_heads swa_rope_theta",
    ),
    row("ministral", windowed(gqa(32, 4096, 32, 8), 4096), rules.all_slide),
    row(
        "modernbert-decoder",
        mha(22, 768, 12, local_attention=128, global_attn_every_n_layers=3, layer_types=None),
        rules.first_of(3, "global_attn_every_n_layers"),
        harmless="sliding_window",
    ),
    row("muse_glimmer_text", windowed(gqa(52, 6656, 32, 2, 128), 2048), rules.counted_backwards(4)),
    row("olmo3", windowed(gqa(32, 4096, 32), 4096), rules.last_of(4)),
    row(
        "smollm3",
        gqa(36, 2048, 16, 4, no_rope_layers=None, no_rope_layer_interval=4, **{**_SWITCHED, "sliding_window": None}),
        rules.rotary_slide,
    ),
    row(
        "step3p5 step3p7_text",
        windowed(gqa(45, 4096, 64, 8, 128), None, attention_other_setting=None, num_nextn_predict_layers=0),
        aliases={"num_key_value_heads": "num_attention_groups"},
        harmless="num_sliding_attention_heads att_impl_type use_head_wise_attn_gate use_rope_layers yarn_only_types",
    ),
    # ------------------------------------------------ one vector for all heads
    row("deepseek_v2", latent(32, 4096, 32, 512, 64, use_mla=True, num_key_value_heads=None), harmless=_LATENT_ONLY),
    row("deepseek_v3 kimi_k2", latent(61, 7168, 128, 512, 64), harmless=_LATENT_ONLY),
    row("deepseek_v32", latent(61, 7168, 128, 512, 64, **_INDEXED), harmless=_INDEX_ONLY),
    row("axk1", latent(61, 7168, 64, 512, 64), harmless=_LATENT_ONLY),
    row("axk2", latent(48, 2048, 32, 128, 32, **_INDEXED), harmless=_INDEX_ONLY),
    row("glm4_moe_lite", latent(47, 2048, 20, 512, 64), harmless=_LATENT_ONLY),
    row(
        "glm_moe_dsa",
        latent(78, 6144, 64, 512, 64, index_topk_pattern=None, index_topk_freq=1, index_skip_topk_offset=2, **_INDEXED),
        harmless=_INDEX_ONLY,
    ),
    row(
        "hy_v4",
        latent(34, 2816, 32, 512, 64, **_INDEXED),
        harmless=_INDEX_ONLY,
        fixed={"index_freq": 4, "index_offset": 2},
    ),
    row("longcat_flash", latent(None, 6144, 64, 512, 64, num_layers=28), harmless=_LATENT_ONLY),
    row("minicpm3", latent(62, 2560, 40, 256, 32), harmless=_LATENT_ONLY + " dim_model_base"),
    row("mistral4", latent(36, 4096, 32, 256, 64), harmless=_LATENT_ONLY),
    row("youtu", latent(32, 2048, 16, 512, 64), harmless=_LATENT_ONLY),
    # ------------------------------------------------ an index key beside keys and values
    row("minimax_m2", gqa(62, 3072, 48, 8, 128, attn_type_list=None), rules.all_ones),
    row(
        "minimax_m3_vl_text minimax_m3_text minimax_m3 minimax_m3_sparse",
        gqa(60, 6144, 64, 4, 128, index_head_dim=128, layer_types=None, sparse_attention_config=None),
        rules.some_indexed,
        harmless="index_n_heads index_block_size index_topk_blocks index_local_blocks",
    ),
    # ------------------------------------------------ models that transformers has no class for
    row(
        "deepseek internlm internlm3 orion xverse Yi aquila solar mimo telechat2 iquestcoder",
        gqa(None, None, None),
        source=VLLM,
    ),
    row("internlm2", gqa(32, 4096, 32), source=PUBLISHER, harmless="attn_implementation"),
    row("exaone", gqa(32, 4096, 32), source=PUBLISHER, aliases={"num_hidden_layers": "num_layers"}),
    row("baichuan", mha(32, 4096, 32), source=PUBLISHER),
    row("minicpm", gqa(32, 4096, 32), source=PUBLISHER, harmless="dim_model_base"),
    row("qwen", mha(32, 4096, 32), source=PUBLISHER, harmless="kv_channels use_logn_attn"),
    row("bailing_moe bailing_moe_v2", gqa(28, 2048, 16, 4), source=VLLM, harmless="max_window_layers"),
    row(
        "chatglm",
        mha(28, 4096, 32, kv_channels=128, multi_query_attention=False, multi_query_group_num=1),
        source=PUBLISHER,
        aliases={"num_hidden_layers": "num_layers"},
        harmless="pre_seq_len",
    ),
    # ------------------------------------------------ Mistral's params.json, which names no model type
    row(
        "params.json",
        gqa(None, None, None, sliding_window=None, kv_lora_rank=None, qk_rope_head_dim=None),
        rules.all_slide,
        source=PUBLISHER,
        aliases={
            "num_hidden_layers": "n_layers",
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_kv_heads",
        },
        harmless="hidden_dim qk_nope_head_dim v_head_dim llama_4_scaling",
    ),
)
