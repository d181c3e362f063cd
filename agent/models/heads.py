"""The networks of heads: small networks that guess further tokens from hidden states of the model.

There are two kinds. An MTP layer (multi-token prediction, DeepSeek-V3, arXiv:2412.19437) is one more layer of the
model, in the model's checkpoint. In Qwen3-Next and Qwen3.5, it has full attention. An EAGLE-3 head (Li et al. 2025,
arXiv:2503.01840) is one layer with a checkpoint of its own.

At position p, a head takes the hidden state of the model at p and the token at p + 1. It computes the logits of the
token at p + 2. To guess further tokens, the head takes its own hidden state instead of the hidden state of the model.
"""

from __future__ import annotations

from mindspore import Tensor, nn

from agent.backends.base import OpTable
from agent.layers.attention import Attention
from agent.layers.embedding import Embedding
from agent.layers.linear import NormWeight, RowParallelLinear, Weight
from agent.layers.mlp import GatedMLP
from agent.layers.rotary import rotary_tables
from agent.models.llama import DecoderLayer
from llm_serving.config import Config
from llm_serving.config.draft_model import Head
from llm_serving.model.shape import ModelShape


class _Head(nn.Cell):
    """The common parts of both kinds of heads: the embedding before the layer, and the output layer after it."""

    def __init__(self, config: Config, head: Head, ops: OpTable) -> None:
        super().__init__()
        shape = config.shape
        self.embedding = Embedding(ops, head.vocab_size, shape.hidden_size)
        self.rotary = ops.rotary(*rotary_tables(shape, config.max_model_len), shape.sliding_window)
        self.join = ops.join_norms(shape.hidden_size, shape.rms_norm_eps, keeps_second=head.norm_before_residual)
        self.norm = NormWeight(ops, shape.hidden_size, shape.norm_dtype)
        self.lm_head = Weight(ops.linear_weight(shape.hidden_size, shape.vocab_size, output=True))
        self.logits = ops.lm_head(shape.vocab_size, shape.rms_norm_eps)
        self.tap = ops.tap(shape.hidden_size)

    def outputs(
        self, hidden: Tensor, residual: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns the two outputs of the graph: the result of ``OpTable.lm_head`` with the logits, and the result of
        ``OpTable.tap`` with the head's hidden states.
        """
        own = self.tap(hidden, residual, step)
        return self.logits(hidden, residual, self.norm.weight, self.lm_head.operands(), last_tokens, step), own


class MtpHead(_Head):
    """An MTP layer. A linear layer joins the embedding and the hidden state. Then a decoder layer of the model's kind
    follows.
    """

    def __init__(self, config: Config, head: Head, ops: OpTable) -> None:
        super().__init__(config, head, ops)
        hidden, dtype = config.shape.hidden_size, config.shape.norm_dtype
        self.embedding_norm, self.state_norm = NormWeight(ops, hidden, dtype), NormWeight(ops, hidden, dtype)
        self.projection = RowParallelLinear(ops, 2 * hidden, hidden)
        self.layers = nn.CellList([DecoderLayer(config, ops, layer=0)])

    def construct(
        self,
        states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
        are_fused: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the two outputs of the graph: the result of ``OpTable.lm_head`` with the logits, and the result of
        ``OpTable.tap`` with the head's hidden states.

        ``states`` [tokens, hidden_size] are normalised hidden states. ``token_ids`` [tokens] are the tokens after
        ``positions`` [tokens]. ``OpTable`` describes ``step``.
        """
        embedded = self.embedding(token_ids, step)
        joined = self.join(embedded, states, self.embedding_norm.weight, self.state_norm.weight, step)
        hidden = self.projection(joined, step)
        hidden, residual = self.layers[0](hidden, hidden, self.rotary(positions), step, False)
        return self.outputs(hidden, residual, last_tokens, step)


class EagleHead(_Head):
    """An EAGLE-3 head. The head fuses the hidden states after three layers of the model, and joins the result with the
    embedding.
    """

    def __init__(self, config: Config, head: Head, ops: OpTable) -> None:
        super().__init__(config, head, ops)
        hidden = config.shape.hidden_size
        self.norms_before_residual = head.norm_before_residual
        self.fused_projection = RowParallelLinear(ops, len(head.layers) * head.hidden_size, hidden)
        self.layers = nn.CellList([EagleLayer(config, ops)])

    def construct(
        self,
        states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
        are_fused: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the two outputs of the graph: the result of ``OpTable.lm_head`` with the logits, and the result of
        ``OpTable.tap`` with the head's hidden states.

        ``states`` are hidden states from three layers of the model, side by side [tokens, 3 x hidden_size]. With
        ``are_fused``, they are the head's own hidden states [tokens, hidden_size]. ``token_ids`` [tokens] are the
        tokens after ``positions`` [tokens]. ``OpTable`` describes ``step``.
        """
        state = states if are_fused else self.fused_projection(states, step)
        embedded, layer = self.embedding(token_ids, step), self.layers[0]
        joined = self.join(embedded, state, layer.input_norm.weight, layer.state_norm.weight, step)
        if self.norms_before_residual:
            joined, state = joined
        hidden, residual = layer(joined, state, self.rotary(positions), step)
        return self.outputs(hidden, residual, last_tokens, step)


class EagleLayer(nn.Cell):
    """The decoder layer of an EAGLE-3 head. Its attention takes the normalised embedding and the normalised hidden
    state, side by side.
    """

    def __init__(self, config: Config, ops: OpTable) -> None:
        super().__init__()
        shape, cache = config.shape, config.pa_config
        hidden = shape.hidden_size
        self.input_norm, self.state_norm = NormWeight(ops, hidden), NormWeight(ops, hidden)
        self.attention = JoinedAttention(ops, shape, cache.num_blocks, cache.block_size)
        self.post_attention_norm = NormWeight(ops, hidden)
        self.mlp = GatedMLP(ops, hidden, shape.intermediate_size, shape.rms_norm_eps)

    def construct(
        self, joined: Tensor, state: Tensor, rotary: tuple[Tensor, ...], step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns the output of the MLP and the residual stream, both [tokens, hidden_size].

        ``joined`` is [tokens, 2 x hidden_size]. ``state`` [tokens, hidden_size] begins the residual stream.
        """
        attended = self.attention.of_joined(joined, rotary, step)
        hidden, residual = self.mlp(attended, state, self.post_attention_norm.weight, step)
        return hidden, residual


class JoinedAttention(Attention):
    """Attention over an input of twice the hidden size. The input is already normalised."""

    def __init__(self, ops: OpTable, shape: ModelShape, num_blocks: int, block_size: int) -> None:
        super().__init__(ops, shape, num_blocks, block_size, layer=0)
        width = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
        self.qkv = RowParallelLinear(ops, 2 * shape.hidden_size, width, biased=shape.attention_bias)

    def of_joined(self, joined: Tensor, rotary: tuple[Tensor, ...], step: tuple[Tensor, ...]) -> Tensor:
        """Returns attention of ``joined`` [tokens, 2 x hidden_size] after the output layer, [tokens, hidden_size]."""
        caches = (self.key_cache, self.value_cache)
        attended = self.attention(self.qkv(joined, step), self.of_heads(), rotary, caches, step, False)
        return self.output(attended, step)
