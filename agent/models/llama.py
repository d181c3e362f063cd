"""The network of all model families: Llama (Touvron et al. 2023; Llama 3, Grattafiori et al. 2024).

Llama has RMSNorm, rotary embedding, grouped-query attention and SwiGLU. Some families add parts to the attention
(``agent/layers/attention.py``), have latent attention (``agent/layers/latent_attention.py``) or have experts. Hybrid
models have linear attention in most layers (``agent/layers/gated_delta.py``).
"""

from __future__ import annotations

from itertools import pairwise

from mindspore import Tensor, nn

from agent.backends.base import Operator, OpTable
from agent.layers.attention import Attention, attention_form
from agent.layers.embedding import Embedding
from agent.layers.gated_delta import GatedDeltaNet
from agent.layers.latent_attention import LatentAttention
from agent.layers.linear import NormWeight, Weight
from agent.layers.mlp import ExpertMLP, GatedMLP
from agent.layers.rotary import local_rotary_tables, rotary_tables
from agent.models.names import ignorable_suffixes, weight_specs
from llm_serving.config import Config
from llm_serving.model.shape import ModelShape

__all__ = ["Llama", "build", "ignorable_suffixes", "weight_specs"]


class Llama(nn.Cell):
    """The whole network, or one stage of it: computes the logits of each sequence's last token from token ids.

    If the model is divided into stages, the first stage has the embedding and the last stage has the output layer. Each
    stage passes the residual stream to the next stage.
    """

    def __init__(self, config: Config, ops: OpTable) -> None:
        super().__init__()
        shape, epsilon = config.shape, config.shape.rms_norm_eps
        self.is_first_stage, self.is_last_stage = ops.is_first_stage, ops.is_last_stage
        self.embeds = ops.embeds
        if self.is_first_stage:
            self.embedding = Embedding(ops, ops.vocab_rows(shape.vocab_size), shape.hidden_size)
        self.rotary = ops.rotary(*rotary_tables(shape, config.max_model_len), shape.sliding_window)
        tapped = config.tapped_layers
        self.taps = nn.CellList([ops.tap(shape.hidden_size) for _ in tapped])
        if shape.gemma is not None:
            self.local_rotary = ops.rotary(*local_rotary_tables(shape, config.max_model_len), shape.sliding_window)
        self.has_local = shape.gemma is not None
        self.layers = nn.CellList([DecoderLayer(config, ops, layer=index) for index in range(shape.num_layers)])
        self.runs = equal_layers(shape, tapped)
        self.are_tapped = tuple(end in tapped for _, end in self.runs)
        operators = [_layers_operator(ops, shape, first, end) for first, end in self.runs]
        self.are_local = tuple(shape.is_local(first) for first, _ in self.runs)
        self.are_whole = tuple(operator is not None for operator in operators)
        self.wholes = nn.CellList([operator for operator in operators if operator is not None])
        if not self.is_last_stage:
            self.hand_over = ops.hand_over(shape.hidden_size)
            return
        self.norm = NormWeight(ops, shape.hidden_size, shape.norm_dtype)
        self.shares_embedding = shape.shares_output and self.is_first_stage and not ops.traits.packs_weights
        if not self.shares_embedding:
            vocab_rows = ops.vocab_rows(shape.vocab_size)
            self.lm_head = Weight(ops.linear_weight(shape.hidden_size, vocab_rows, output=True))
        self.logits = ops.lm_head(shape.vocab_size, epsilon)

    def construct(
        self, entry: Tensor, positions: Tensor, last_tokens: Tensor, step: tuple[Tensor, ...], whole_prompts: bool
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns the output of ``OpTable.lm_head`` with the logits. If another stage follows, returns the output of
        ``OpTable.hand_over`` instead. With ``Config.tapped_layers``, the outputs of ``OpTable.tap`` follow.

        ``entry`` is the first input of the graph. In the first stage, it is the token ids [tokens], or the embeddings
        [tokens, hidden_size] if the model reads images. In later stages, it is the residual stream
        [tokens, hidden_size] of the previous stage. ``positions`` [tokens] are the tokens' positions. ``last_tokens``
        [sequences] is the index of each sequence's last token. ``OpTable`` describes ``step`` and ``whole_prompts``.
        """
        whole_rotary = self.rotary(positions)
        local_rotary = self.local_rotary(positions) if self.has_local else whole_rotary
        hidden = self.embedding(entry, step) if self.embeds else entry
        residual = hidden
        operator = tap = 0
        tapped: tuple[Tensor, ...] = ()
        for number, (first, end) in enumerate(self.runs):
            rotary = local_rotary if self.are_local[number] else whole_rotary
            if self.are_whole[number]:
                operands: tuple[tuple[Tensor, ...], ...] = ()
                for index in range(first, end):
                    operands = (*operands, self.layers[index].operands())
                hidden, residual = self.wholes[operator](hidden, residual, operands, rotary, step)
                operator += 1
            else:
                for index in range(first, end):
                    hidden, residual = self.layers[index](hidden, residual, rotary, step, whole_prompts)
            if self.are_tapped[number]:
                tapped = (*tapped, self.taps[tap](hidden, residual, step))
                tap += 1
        if not self.is_last_stage:
            return self.hand_over(hidden, residual, step)
        weight = self.embedding.weight if self.shares_embedding else self.lm_head.operands()
        output = self.logits(hidden, residual, self.norm.weight, weight, last_tokens, step)
        return (output, *tapped) if tapped else output


class DecoderLayer(nn.Cell):
    """One decoder layer: a norm, attention, a second norm, and an MLP.

    Attention and MLP do not add their outputs to the residual stream. The operator of the next norm adds them.
    """

    def __init__(self, config: Config, ops: OpTable, *, layer: int) -> None:
        super().__init__()
        shape, cache = config.shape, config.pa_config
        hidden, epsilon = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = NormWeight(ops, hidden, shape.norm_dtype)
        if shape.has_cache(layer):
            attention = Attention if shape.latent is None else LatentAttention
            self.attention = attention(ops, shape, cache.num_blocks, cache.block_size, layer=layer)
        else:
            self.attention = GatedDeltaNet(ops, shape, layer=layer)
        self.post_attention_norm = NormWeight(ops, hidden, shape.norm_dtype)
        self.has_result_norms = shape.gemma is not None
        if self.has_result_norms:
            self.attention_result_norm = NormWeight(ops, hidden, shape.norm_dtype)
            self.mlp_result_norm = NormWeight(ops, hidden, shape.norm_dtype)
        self.norm_attention: Operator = ops.result_norm(epsilon) if self.has_result_norms else None
        self.norm_mlp: Operator = ops.result_norm(epsilon) if self.has_result_norms else None
        self.norms_results = self.norm_attention is not None
        if shape.experts is not None and shape.has_experts(layer):
            self.mlp = ExpertMLP(ops, hidden, shape.experts, epsilon)
        else:
            self.mlp = GatedMLP(ops, hidden, shape.intermediate_size, epsilon)

    def operands(self) -> tuple[Tensor, ...]:
        """Returns the parameters of this layer for ``OpTable.decoder_layers``.

        The layer must not have experts or latent attention.
        """
        attention, mlp = self.attention, self.mlp
        norms = (self.input_norm.weight, self.post_attention_norm.weight)
        weights = (attention.qkv.weight, attention.output.weight, mlp.gate_up.weight, mlp.down.weight)
        operands = (*norms, *weights, attention.key_cache, attention.value_cache, *attention.of_heads())
        if self.has_result_norms:
            operands = (*operands, self.attention_result_norm.weight, self.mlp_result_norm.weight)
        return operands

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output of the MLP, and the residual stream to which the next layer adds this output.

        Both are [tokens, hidden_size]. ``hidden`` and ``residual`` are the two results of the previous layer.
        """
        hidden, residual = self.attention(hidden, residual, self.input_norm.weight, rotary, step, whole_prompts)
        if self.norms_results:
            hidden = self.norm_attention(hidden, self.attention_result_norm.weight, step)
        hidden, residual = self.mlp(hidden, residual, self.post_attention_norm.weight, step)
        if self.norms_results:
            hidden = self.norm_mlp(hidden, self.mlp_result_norm.weight, step)
        return hidden, residual


def equal_layers(shape: ModelShape, tapped: tuple[int, ...] = ()) -> tuple[tuple[int, int], ...]:
    """Returns ranges [first, end) of consecutive layers of the same kind. One operator can run the layers of a range
    together.

    For each number n in ``tapped``, ``OpTable.tap`` reads the residual stream after the first n layers. Therefore a
    range ends at each of these numbers.
    """
    kinds = [
        (attention_form(shape, layer), shape.has_experts(layer), shape.has_cache(layer))
        for layer in range(shape.num_layers)
    ]
    starts = [
        layer for layer in range(shape.num_layers) if layer == 0 or layer in tapped or kinds[layer] != kinds[layer - 1]
    ]
    return tuple(pairwise([*starts, shape.num_layers]))


def _layers_operator(ops: OpTable, shape: ModelShape, first: int, end: int) -> Operator | None:
    if shape.has_experts(first) or shape.latent is not None or shape.delta is not None:
        return None
    form = attention_form(shape, first)
    return ops.decoder_layers(
        shape.hidden_size,
        shape.rms_norm_eps,
        form,
        end - first,
        first=first == 0,
        result_norms=shape.gemma is not None,
    )


def build(config: Config, ops: OpTable) -> Llama:
    """Builds the network. Its parameters have no memory yet."""
    return Llama(config, ops)
