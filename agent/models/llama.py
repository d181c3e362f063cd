"""Llama (Touvron et al. 2023; Llama 3, Grattafiori et al. 2024): RMSNorm, rotary, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore import Tensor, nn

from agent.backends.base import Operator, OpTable
from agent.layers.attention import Attention
from agent.layers.embedding import Embedding
from agent.layers.linear import Weight
from agent.layers.mlp import GatedMLP
from agent.layers.norm import NormWeight
from agent.layers.rotary import rotary_tables
from agent.weights import WeightKind, WeightPart, WeightSpec
from llm_serving.config import Config
from llm_serving.model_shape import ModelShape


class Llama(nn.Cell):
    """Token ids to logits of each sequence's last token."""

    def __init__(self, config: Config, ops: OpTable) -> None:
        super().__init__()
        shape, epsilon = config.shape, config.shape.rms_norm_eps
        self.embedding = Embedding(ops, shape.vocab_size, shape.hidden_size)
        self.rotary = ops.rotary(*rotary_tables(shape, config.max_model_len))
        self.layers = nn.CellList([DecoderLayer(config, ops, first=index == 0) for index in range(shape.num_layers)])
        self.norm = NormWeight(ops, shape.hidden_size)
        self.shares_embedding = shape.tie_word_embeddings and not ops.packs_weights
        if not self.shares_embedding:
            self.lm_head = Weight(ops, shape.hidden_size, shape.vocab_size)
        self.logits = ops.lm_head(shape.vocab_size, epsilon)

    def construct(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...], whole_prompts: bool
    ) -> Tensor:
        """token_ids, positions [T]; last_tokens [S], the index in T of each sequence's last token; ``step`` and
        ``whole_prompts`` as in ``OpTable`` -> what ``OpTable.lm_head`` gives for logits [S, vocab_size]."""
        rotary = self.rotary(positions)
        hidden = self.embedding(token_ids, step)
        residual = hidden
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotary, step, whole_prompts)
        weight = self.embedding.weight if self.shares_embedding else self.lm_head.weight
        return self.logits(hidden, residual, self.norm.weight, weight, last_tokens, step)


class DecoderLayer(nn.Cell):
    """Attention and MLP, each on the normalised residual stream. A block's output is added by the norm that follows."""

    def __init__(self, config: Config, ops: OpTable, *, first: bool) -> None:
        super().__init__()
        shape, cache = config.shape, config.pa_config
        self.input_norm = NormWeight(ops, shape.hidden_size)
        self.attention = Attention(ops, shape, cache.num_blocks, cache.block_size, first=first)
        self.post_attention_norm = NormWeight(ops, shape.hidden_size)
        self.mlp = GatedMLP(ops, shape.hidden_size, shape.intermediate_size, shape.rms_norm_eps)
        self.whole: Operator = ops.decoder_layer(shape.hidden_size, shape.rms_norm_eps, first=first)
        self.is_whole = self.whole is not None

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> tuple[Tensor, Tensor]:
        """hidden, the last block's output, and residual, the stream without it, [T, hidden_size] -> the same two."""
        attention, mlp = self.attention, self.mlp
        if self.is_whole:
            norms = (self.input_norm.weight, self.post_attention_norm.weight)
            weights = (attention.qkv.weight, attention.output.weight, mlp.gate_up.weight, mlp.down.weight)
            caches = (attention.key_cache, attention.value_cache)
            hidden, residual = self.whole(hidden, residual, norms, weights, rotary, caches, step)
            return hidden, residual
        hidden, residual = attention(hidden, residual, self.input_norm.weight, rotary, step, whole_prompts)
        hidden, residual = mlp(hidden, residual, self.post_attention_norm.weight, step)
        return hidden, residual


def build(config: Config, ops: OpTable) -> Llama:
    """The Cell, its parameters without memory yet."""
    return Llama(config, ops)


def weight_specs(shape: ModelShape) -> list[WeightSpec]:
    """Every parameter to load, in the order of the layers; names as the parameters of ``Llama`` are called."""
    hidden, vocab = shape.hidden_size, shape.vocab_size
    specs = [_spec("embedding.weight", ("model.embed_tokens.weight", vocab, hidden))]
    for index in range(shape.num_layers):
        specs.extend(_layer_specs(shape, index))
    specs.append(_spec("norm.weight", ("model.norm.weight", hidden)))
    tied = shape.tie_word_embeddings
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    specs.append(_spec("lm_head.weight", (output, vocab, hidden), kind="linear", packed_only=tied))
    return specs


def ignorable_suffixes(shape: ModelShape) -> tuple[str, ...]:
    """Ends of names that a checkpoint may hold and the model does not need: rotary frequencies, which follow from
    config.json, and the output weight where it is the embedding."""
    return ("rotary_emb.inv_freq", "lm_head.weight") if shape.tie_word_embeddings else ("rotary_emb.inv_freq",)


def _layer_specs(shape: ModelShape, index: int) -> Iterator[WeightSpec]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    yield _spec(f"{ours}.input_norm.weight", (f"{theirs}.input_layernorm.weight", hidden))
    yield _spec(
        f"{ours}.attention.qkv.weight",
        (f"{theirs}.self_attn.q_proj.weight", query, hidden),
        (f"{theirs}.self_attn.k_proj.weight", key, hidden),
        (f"{theirs}.self_attn.v_proj.weight", key, hidden),
        kind="linear",
    )
    yield _spec(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight", hidden, query), kind="linear")
    yield _spec(f"{ours}.post_attention_norm.weight", (f"{theirs}.post_attention_layernorm.weight", hidden))
    yield _spec(
        f"{ours}.mlp.gate_up.weight",
        (f"{theirs}.mlp.gate_proj.weight", inner, hidden),
        (f"{theirs}.mlp.up_proj.weight", inner, hidden),
        kind="gated_linear",
    )
    yield _spec(f"{ours}.mlp.down.weight", (f"{theirs}.mlp.down_proj.weight", hidden, inner), kind="linear")


def _spec(
    parameter: str, *parts: tuple[str | int, ...], kind: WeightKind = "plain", packed_only: bool = False
) -> WeightSpec:
    """Parts are (Hugging Face name, sizes ...)."""
    tensors = tuple(WeightPart(str(name), tuple(int(size) for size in sizes)) for name, *sizes in parts)
    return WeightSpec(parameter, tensors, kind, packed_only)
