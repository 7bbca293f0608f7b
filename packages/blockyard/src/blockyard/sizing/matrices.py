"""Weight matrices of a text model, counted from its config, under the names of published files.

Each architecture is a row with its differences. Unknown architectures are rejected, because a guess would miss parts.
The tests build every row with transformers, without allocating memory, and compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..arguments import shown
from ..errors import InvalidArgument
from .config_fields import ConfigFields
from .from_config import read_layers
from .layers import AttentionLayer, StateLayer
from .shape import ModelShape

#: Kinds of matrices: linear layers, which may be quantized; routers and others, which are not.
LINEAR, ROUTER, PLAIN = "linear", "router", "plain"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Equal matrices of one module.

    Attributes:
        name: name of the module in the published file; for experts, the name of the first one.
        rows: rows of each.
        columns: columns of each.
        count: number of matrices (experts).
        kind: LINEAR, ROUTER or PLAIN.
        ways: most ranks that can divide them; 0 for no limit, 1 if each rank keeps them whole.
    """

    name: str
    rows: int
    columns: int = 1
    count: int = 1
    kind: str = LINEAR
    ways: int = 0

    @property
    def num_elements(self) -> int:
        """Return the number of elements of all of them together."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True, slots=True)
class Architecture:
    """Differences of an architecture from Llama's.

    Attributes:
        is_tied: whether the head is tied to the embedding by default.
        num_norms: norms of `hidden_size` per layer.
        has_qkv_bias: whether queries, keys and values always have biases.
        has_output_bias: whether `attention_bias` also adds one to the output.
        qk_norm: "head" for norms of the size of a head, "all" for norms of all heads, "flag" for "head" if
            `use_qk_norm` is set, "" for none.
        has_gate: whether queries have a gate of their size.
        mlp: name of a layer's MLP.
        experts: names of an expert's three matrices.
        has_correction: whether the router has a bias per expert.
    """

    is_tied: bool = False
    num_norms: int = 2
    has_qkv_bias: bool = False
    has_output_bias: bool = True
    qk_norm: str = ""
    has_gate: bool = False
    mlp: str = "mlp"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_correction: bool = False


_MIXTRAL = ("w1", "w3", "w2")
ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "ministral3": Architecture(),
    "granite": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(has_qkv_bias=True),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), Architecture(has_qkv_bias=True)),
    "qwen3": Architecture(qk_norm="head"),
    "smollm3": Architecture(),
    "olmo2": Architecture(qk_norm="all"),
    "olmo3": Architecture(qk_norm="all"),
    "hunyuan_v1_dense": Architecture(qk_norm="head"),
    "exaone4": Architecture(qk_norm="head"),
    "ernie4_5": Architecture(is_tied=True),
    "seed_oss": Architecture(has_output_bias=False),
    "gemma": Architecture(is_tied=True),
    "gemma2": Architecture(is_tied=True, num_norms=4),
    "gemma3_text": Architecture(is_tied=True, num_norms=4, qk_norm="head"),
    "gemma4_text": Architecture(is_tied=True, num_norms=4, qk_norm="head"),
    "mixtral": Architecture(mlp="block_sparse_moe", experts=_MIXTRAL),
    "qwen2_moe": Architecture(has_qkv_bias=True),
    "qwen3_moe": Architecture(qk_norm="head"),
    "qwen3_next": Architecture(qk_norm="head", has_gate=True),
    "qwen3_5_text": Architecture(qk_norm="head", has_gate=True),
    "qwen3_5_moe_text": Architecture(qk_norm="head", has_gate=True),
    "qwen3_vl_text": Architecture(qk_norm="head"),
    "qwen3_vl_moe_text": Architecture(qk_norm="head"),
    "glm4_moe": Architecture(qk_norm="flag", has_output_bias=False, has_correction=True),
    "glm4_moe_lite": Architecture(has_correction=True),
    "glm_moe_dsa": Architecture(has_correction=True),
    "deepseek_v2": Architecture(),
    "deepseek_v3": Architecture(has_correction=True),
    "deepseek_v32": Architecture(has_correction=True),
    "kimi_k2": Architecture(has_correction=True),
    "gpt_oss": Architecture(),
    "llama4_text": Architecture(mlp="feed_forward"),
    "minimax_m2": Architecture(qk_norm="all", mlp="block_sparse_moe", experts=_MIXTRAL, has_correction=True),
}


def text_matrices(config: object) -> list[Matrix]:
    """Return the matrices of the text model: embeddings, layers, norms, and the head unless it is tied. O(layers).

    Raises `InvalidArgument` naming the architecture that is unknown, or the field that is missing.
    """
    return list(_Text(config).matrices())


def draft_matrices(config: object) -> list[Matrix]:
    """Return the matrices of the draft layers (multi-token prediction), without the shared embedding and head. O(1).

    Empty if the config has none. Raises `InvalidArgument` naming the architecture that is unknown, or the field that is
    missing.
    """
    return list(_Text(config).drafts())


def mlp_is_mixture(fields: ConfigFields, shape: ModelShape, index: int) -> bool:
    """Return whether a layer's MLP is a mixture of experts. Gemma 4's also has a dense MLP."""
    if not shape.num_experts:
        return False
    if fields.model_type == "gemma4_text":
        return fields.flag("enable_moe_block")
    if fields.model_type == "llama4_text":
        listed = fields.items("moe_layers")
        step = fields.count("interleave_moe_layer_step", default=1)
        return index in listed if listed else (index + 1) % step == 0
    return index >= fields.count("first_k_dense_replace", low=0, default=0)


class _Text:
    """The matrices of a text model."""

    def __init__(self, config: object) -> None:
        fields = ConfigFields(config)
        kind = ARCHITECTURES.get(fields.model_type)
        if kind is None:
            raise InvalidArgument(
                f"model_type is {shown(fields.model_type)}; to count parameters it must be one of "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        _refuse_unknown_parts(fields)
        self._fields, self._kind = fields, kind
        self._shape = ModelShape.from_config(config)
        attention, states = read_layers(fields)
        self._attention = {layer.index: layer for layer in attention}
        self._states = {layer.index: layer for layer in states}
        self._num_layers = _num_layers(fields, [*self._attention, *self._states])

    def matrices(self) -> Iterator[Matrix]:
        hidden, vocabulary = self._shape.hidden_size, self._shape.vocab_size
        yield Matrix("model.embed_tokens", vocabulary, hidden, kind=PLAIN)
        yield from self._per_layer_embeddings()
        for index in range(self._num_layers):
            yield from self._layer(index, f"model.layers.{index}")
        yield _plain("model.norm", hidden)
        tied = self._fields.top("tie_word_embeddings")
        if not (self._kind.is_tied if tied is None else tied):
            yield Matrix("lm_head", vocabulary, hidden)

    def drafts(self) -> Iterator[Matrix]:
        """Yield a projection of two hidden states, a layer of the model's last kind, and norms."""
        count = self._fields.count("num_nextn_predict_layers", "mtp_num_hidden_layers", low=0, default=0)
        hidden, last = self._shape.hidden_size, max(self._attention, default=0)
        is_qwen = self._fields.get("mtp_num_hidden_layers") is not None
        for number in range(count):
            base = f"mtp.layers.{number}" if is_qwen else f"model.layers.{self._num_layers + number}"
            if not is_qwen or number == 0:
                name = "mtp.fc" if is_qwen else f"{base}.eh_proj"
                yield Matrix(name, hidden, 2 * hidden, kind=PLAIN, ways=1)
                yield _plain("mtp.norm" if is_qwen else f"{base}.enorm", 3 * hidden)
            yield from self._layer(last, base)

    def _layer(self, index: int, base: str) -> Iterator[Matrix]:
        state, layer = self._states.get(index), self._attention.get(index)
        if state is not None:
            yield from self._linear_attention(state, f"{base}.linear_attn")
        elif layer is not None and layer.is_latent:
            yield from self._latent_attention(layer, f"{base}.self_attn")
        else:
            yield from self._self_attention(index, layer, f"{base}.self_attn")
        yield from self._mlp(index, f"{base}.{self._kind.mlp}", base)
        yield _plain(f"{base}.norms", self._kind.num_norms * self._shape.hidden_size)

    def _self_attention(self, index: int, layer: AttentionLayer | None, base: str) -> Iterator[Matrix]:
        fields, hidden = self._fields, self._shape.hidden_size
        heads = fields.count("num_attention_heads", default=8)  # Gemma 3 leaves its eight heads out
        size = _shared_key_size(fields, index) if layer is None else layer.key_size
        queries = heads * size
        keys = 0 if layer is None else layer.num_kv_heads * size
        yield Matrix(f"{base}.q_proj", queries * (2 if self._kind.has_gate else 1), hidden)
        if layer is not None:
            yield Matrix(f"{base}.k_proj", keys, hidden, ways=layer.num_kv_heads)
            if not self._values_are_keys(index):
                yield Matrix(f"{base}.v_proj", layer.num_kv_heads * layer.value_size, hidden, ways=layer.num_kv_heads)
        yield Matrix(f"{base}.o_proj", hidden, queries)
        yield _plain(f"{base}.bias", self._biases(queries, 2 * keys))
        if fields.model_type == "gpt_oss":
            yield _plain(f"{base}.sinks", heads, ways=0)
        norms = self._kind.qk_norm
        if norms == "all":
            yield _plain(f"{base}.qk_norm", queries + keys)
        elif norms == "head" or (norms == "flag" and fields.flag("use_qk_norm")):
            yield _plain(f"{base}.qk_norm", size * (1 if layer is None else 2))

    def _values_are_keys(self, index: int) -> bool:
        """Return whether a layer uses its keys as values: Gemma 4's full layers with `attention_k_eq_v`."""
        fields = self._fields
        return fields.model_type == "gemma4_text" and fields.flag("attention_k_eq_v") and _is_full(fields, index)

    def _biases(self, queries: int, keys_and_values: int) -> int:
        if self._kind.has_qkv_bias:
            return queries + keys_and_values
        if not self._fields.flag("attention_bias") and self._fields.model_type != "gpt_oss":
            return 0
        return queries + keys_and_values + (self._shape.hidden_size if self._kind.has_output_bias else 0)

    def _latent_attention(self, layer: AttentionLayer, base: str) -> Iterator[Matrix]:
        """Yield the matrices of DeepSeek's attention.

        Queries, and keys with values, pass through narrow normed vectors.
        """
        fields, hidden = self._fields, self._shape.hidden_size
        heads, rotary, latent = (fields.count(f) for f in ("num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
        key, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
        narrow = fields.count("q_lora_rank", low=0, default=0)
        wide = heads * (key + rotary)
        if narrow:
            yield Matrix(f"{base}.q_a_proj", narrow, hidden, ways=1)
            yield Matrix(f"{base}.q_b_proj", wide, narrow)
        else:
            yield Matrix(f"{base}.q_proj", wide, hidden)
        yield Matrix(f"{base}.kv_a_proj_with_mqa", latent + rotary, hidden, ways=1)
        yield Matrix(f"{base}.kv_b_proj", heads * (key + value), latent)
        yield Matrix(f"{base}.o_proj", hidden, heads * value)
        yield _plain(f"{base}.norms", narrow + latent)
        if layer.index_size:
            yield from self._indexer(layer.index_size, narrow, f"{base}.indexer")

    def _indexer(self, size: int, narrow: int, base: str) -> Iterator[Matrix]:
        """Yield the matrices of DeepSeek V3.2's indexer, which selects the tokens to attend to."""
        hidden, heads = self._shape.hidden_size, self._fields.count("index_n_heads")
        yield Matrix(f"{base}.wq_b", heads * size, narrow, ways=1)
        yield Matrix(f"{base}.wk", size, hidden, ways=1)
        yield Matrix(f"{base}.weights_proj", heads, hidden, kind=PLAIN, ways=1)
        yield _plain(f"{base}.k_norm", 2 * size)

    def _linear_attention(self, layer: StateLayer, base: str) -> Iterator[Matrix]:
        if layer.kind != "gated delta net":
            raise InvalidArgument(f"layer {layer.index} is {layer.kind}; counting its parameters is not supported")
        fields, hidden = self._fields, self._shape.hidden_size
        keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
        heads = fields.count("linear_num_value_heads")
        values = heads * fields.count("linear_value_head_dim")
        if fields.model_type == "qwen3_next":
            yield Matrix(f"{base}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
            yield Matrix(f"{base}.in_proj_ba", 2 * heads, hidden, kind=ROUTER)
        else:
            yield Matrix(f"{base}.in_proj_qkv", 2 * keys + values, hidden)
            yield Matrix(f"{base}.in_proj_z", values, hidden)
            yield Matrix(f"{base}.in_proj_a", heads, hidden, kind=ROUTER)
            yield Matrix(f"{base}.in_proj_b", heads, hidden, kind=ROUTER)
        kernel = fields.count("linear_conv_kernel_dim")
        yield Matrix(f"{base}.conv1d", 2 * keys + values, kernel, kind=PLAIN)
        yield Matrix(f"{base}.out_proj", hidden, values)
        yield _plain(f"{base}.norm", fields.count("linear_value_head_dim") + 2 * heads)

    def _mlp(self, index: int, base: str, layer: str) -> Iterator[Matrix]:
        is_mixture = mlp_is_mixture(self._fields, self._shape, index)
        kind = self._fields.model_type
        if kind == "gemma4_text":
            yield from self._gemma_4(index, base, layer, is_mixture)
        elif not is_mixture:
            wide = self._fields.count("intermediate_size_mlp", default=self._shape.mlp_size)
            yield from _three(base, wide, self._shape.hidden_size)
        elif kind in ("gpt_oss", "llama4_text"):
            yield from self._fused_experts(base)
        else:
            yield from self._experts(base)

    def _experts(self, base: str) -> Iterator[Matrix]:
        hidden, shape = self._shape.hidden_size, self._shape
        gate, up, down = (f"{base}.experts.0.{name}" for name in self._kind.experts)
        yield Matrix(gate, shape.expert_size, hidden, shape.num_experts)
        yield Matrix(up, shape.expert_size, hidden, shape.num_experts)
        yield Matrix(down, hidden, shape.expert_size, shape.num_experts)
        yield Matrix(f"{base}.gate", shape.num_experts, hidden, kind=ROUTER, ways=1)
        if self._kind.has_correction:
            yield _plain(f"{base}.gate.e_score_correction_bias", shape.num_experts)
        size = self._fields.count("shared_expert_intermediate_size", low=0, default=0)  # Qwen's has a gate
        if size:
            yield from _three(f"{base}.shared_expert", size, hidden)
            yield Matrix(f"{base}.shared_expert_gate", 1, hidden, kind=ROUTER, ways=1)
        shared = self._fields.count("n_shared_experts", low=0, default=0)
        if shared:
            yield from _three(f"{base}.shared_experts", shared * shape.expert_size, hidden)

    def _fused_experts(self, base: str) -> Iterator[Matrix]:
        """Yield experts with gate and up in one matrix: gpt-oss's with biases, Llama 4's with a shared expert."""
        hidden, shape = self._shape.hidden_size, self._shape
        yield Matrix(f"{base}.experts.gate_up_proj", 2 * shape.expert_size, hidden, shape.num_experts)
        yield Matrix(f"{base}.experts.down_proj", hidden, shape.expert_size, shape.num_experts)
        yield Matrix(f"{base}.router", shape.num_experts, hidden, kind=ROUTER, ways=1)
        if self._fields.model_type == "llama4_text":
            yield from _three(f"{base}.shared_expert", shape.expert_size, hidden)
            return
        yield _plain(f"{base}.router.bias", shape.num_experts)
        yield _plain(f"{base}.experts.bias", shape.num_experts * (2 * shape.expert_size + hidden), ways=0)

    def _gemma_4(self, index: int, base: str, layer: str, is_mixture: bool) -> Iterator[Matrix]:
        fields, hidden, shape = self._fields, self._shape.hidden_size, self._shape
        is_wide = fields.flag("use_double_wide_mlp") and index not in self._attention
        yield from _three(base, shape.mlp_size * (2 if is_wide else 1), hidden)
        yield _plain(f"{layer}.layer_scalar", 1)
        narrow = fields.count("hidden_size_per_layer_input", low=0, default=0)
        if narrow:
            yield Matrix(f"{layer}.per_layer_input_gate", narrow, hidden, ways=1)
            yield Matrix(f"{layer}.per_layer_projection", hidden, narrow, ways=1)
            yield _plain(f"{layer}.post_per_layer_input_norm", hidden)
        if is_mixture:
            count, size = shape.num_experts, shape.expert_size
            yield Matrix(f"{layer}.experts.gate_up_proj", 2 * size, hidden, count)
            yield Matrix(f"{layer}.experts.down_proj", hidden, size, count)
            yield Matrix(f"{layer}.router.proj", count, hidden, kind=ROUTER, ways=1)
            yield _plain(f"{layer}.router.scale", hidden + count + 3 * hidden)

    def _per_layer_embeddings(self) -> Iterator[Matrix]:
        """Yield the additional embedding per layer of Gemma 4's small models."""
        fields, hidden = self._fields, self._shape.hidden_size
        narrow = fields.count("hidden_size_per_layer_input", low=0, default=0)
        if fields.model_type != "gemma4_text" or not narrow:
            return
        words = fields.count("vocab_size_per_layer_input", default=self._shape.vocab_size)
        wide = narrow * self._num_layers
        yield Matrix("model.embed_tokens_per_layer", words, wide, kind=PLAIN)
        yield Matrix("model.per_layer_model_projection", wide, hidden, ways=1)
        yield _plain("model.per_layer_projection_norm", narrow)


def _plain(name: str, size: int, ways: int = 1) -> Matrix:
    return Matrix(name, size, kind=PLAIN, ways=ways)


def _three(base: str, size: int, hidden: int) -> Iterator[Matrix]:
    yield Matrix(f"{base}.gate_proj", size, hidden)
    yield Matrix(f"{base}.up_proj", size, hidden)
    yield Matrix(f"{base}.down_proj", hidden, size)


def _refuse_unknown_parts(fields: ConfigFields) -> None:
    for name in ("mlp_only_layers", "mlp_bias"):
        if fields.get(name):
            raise InvalidArgument(
                f"{name} is {shown(fields.get(name))}; counting the parameters of such layers is not supported"
            )
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        if fields.count(name, default=1) != 1:
            raise InvalidArgument(f"{name} is {shown(fields.get(name))}; it must be 1")


def _num_layers(fields: ConfigFields, indices: list[int]) -> int:
    return fields.count("num_hidden_layers", default=max(indices) + 1)


def _is_full(fields: ConfigFields, index: int) -> bool:
    kinds = fields.items("layer_types")
    return kinds is not None and index < len(kinds) and kinds[index] == "full_attention"


def _shared_key_size(fields: ConfigFields, index: int) -> int:
    """Return the elements of a query head in a layer that reads another layer's keys and values (Gemma 4)."""
    own = fields.of_layer(index)
    if _is_full(fields, index) and own.get("global_head_dim") is not None:
        return own.count("global_head_dim")
    return own.count("head_dim")
