"""Implements a Llama for training, with standard MindSpore operators (float32).

The model computes the same as Hugging Face's Llama. It has RMSNorm before each sub-layer, rotate-half rotary embedding
(Su et al., RoFormer, 2021) and grouped-query attention (Ainslie et al., 2023). It also has SwiGLU (Shazeer, 2020) and
tied embeddings. Parameters have Hugging Face's tensor names, so the export does not rename them.
"""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import operations as P
from numpy.typing import NDArray

from .initial import Circuit, HeadWeights


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model. ``hidden_size`` may differ from ``num_heads * head_dim``."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 640
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048


def rotary_tables(shape: ModelShape, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns cosines and sines of positions 0 to length-1, each ``[length, head_dim]``, with equal halves."""
    half = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    angles = np.outer(np.arange(length), shape.rope_theta**-half)
    angles = np.concatenate([angles, angles], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def initial_weight(rng: np.random.Generator, rows: int, columns: int, scale: float = 0.02) -> Tensor:
    """Returns a random normal matrix [rows, columns] with standard deviation ``scale``."""
    return Tensor((rng.standard_normal((rows, columns)) * scale).astype(np.float32))


def linear(rng: np.random.Generator, inputs: int, outputs: int, scale: float = 0.02) -> nn.Dense:
    """Returns a linear layer without bias. Its weights are random, with standard deviation ``scale``."""
    return nn.Dense(inputs, outputs, weight_init=initial_weight(rng, outputs, inputs, scale), has_bias=False)


class RMSNorm(nn.Cell):
    """Normalises the last axis by its root mean square (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(size, np.float32)))
        self.epsilon = epsilon
        self.mean = P.ReduceMean(keep_dims=True)

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt(self.mean(x * x, -1) + self.epsilon) * self.weight


class Attention(nn.Cell):
    """Causal grouped-query attention over complete sequences. Query heads that share a key head are stacked."""

    def __init__(self, shape: ModelShape, rng: np.random.Generator) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.group = self.heads // self.kv_heads
        self.width = self.heads * self.head_dim
        self.q_proj = linear(rng, shape.hidden_size, self.width)
        self.k_proj = linear(rng, shape.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = linear(rng, shape.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = linear(rng, self.width, shape.hidden_size, 0.02 / np.sqrt(2 * shape.num_layers))
        self.scores = P.BatchMatMul(transpose_b=True)
        self.mix = P.BatchMatMul()
        self.softmax = P.Softmax(-1)
        self.scale = float(shape.head_dim) ** -0.5

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Applies rotate-half rotary embedding to ``x`` [batch, heads, length, head_dim]."""
        first, second = ops.split(x, self.head_dim // 2, axis=-1)
        return x * cos + ops.concat((-second, first), axis=-1) * sin

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, batch: int) -> Tensor:
        """Returns the attention output of ``x``, both [batch * length, hidden].

        ``mask`` [batch, 1, group * length, length] is added to the scores. ``group`` is the number of query heads per
        key head.
        """
        query = ops.transpose(self.q_proj(x).reshape(batch, -1, self.heads, self.head_dim), (0, 2, 1, 3))
        key = ops.transpose(self.k_proj(x).reshape(batch, -1, self.kv_heads, self.head_dim), (0, 2, 1, 3))
        value = ops.transpose(self.v_proj(x).reshape(batch, -1, self.kv_heads, self.head_dim), (0, 2, 1, 3))
        query = self.rotate(query, cos * self.scale, sin * self.scale)
        key = self.rotate(key, cos, sin)
        query = query.reshape(batch, self.kv_heads, -1, self.head_dim)
        weights = self.softmax(self.scores(query, key) + mask)
        mixed = self.mix(weights, value).reshape(batch, self.heads, -1, self.head_dim)
        return self.o_proj(ops.transpose(mixed, (0, 2, 1, 3)).reshape(-1, self.width))


class MLP(nn.Cell):
    """The feed-forward part of a layer (SwiGLU), for inputs [rows, hidden]."""

    def __init__(self, shape: ModelShape, rng: np.random.Generator) -> None:
        super().__init__()
        self.gate_proj = linear(rng, shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(rng, shape.hidden_size, shape.intermediate_size)
        scale = 0.02 / np.sqrt(2 * shape.num_layers)
        self.down_proj = linear(rng, shape.intermediate_size, shape.hidden_size, scale)

    def construct(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * ops.sigmoid(gate) * self.up_proj(x))


class DecoderLayer(nn.Cell):
    """A decoder layer: attention, then feed-forward. Both normalise their input and add their output to the input."""

    def __init__(self, shape: ModelShape, rng: np.random.Generator) -> None:
        super().__init__()
        self.self_attn = Attention(shape, rng)
        self.mlp = MLP(shape, rng)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, batch: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Cell):
    """Embedding, layers and final norm. The attributes have Hugging Face's names, so tensors need no renaming."""

    def __init__(self, shape: ModelShape, rng: np.random.Generator) -> None:
        super().__init__()
        self.embed_tokens = nn.Cell()
        self.embed_tokens.weight = Parameter(initial_weight(rng, shape.vocab_size, shape.hidden_size))
        self.layers = nn.CellList([DecoderLayer(shape, rng) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


def add_to(parameter: Parameter, rows: slice, columns: slice, values: NDArray[np.float32]) -> None:
    """Adds ``values`` to the given rows and columns of a weight."""
    weight = parameter.asnumpy().copy()
    weight[rows, columns] += values
    parameter.set_data(Tensor(weight))


def add_head(attention: Attention, kv_head: int, query_key: HeadWeights, value_output: HeadWeights) -> None:
    """Adds weights to a key/value head and to the first query head of its group."""
    dim, everything = attention.head_dim, slice(None)
    query_rows = slice(kv_head * attention.group * dim, (kv_head * attention.group + 1) * dim)
    key_rows = slice(kv_head * dim, (kv_head + 1) * dim)
    add_to(attention.q_proj.weight, query_rows, everything, query_key[0])
    add_to(attention.k_proj.weight, key_rows, everything, query_key[1])
    add_to(attention.v_proj.weight, key_rows, everything, value_output[0])
    add_to(attention.o_proj.weight, everything, query_rows, value_output[1])


def install_circuit(decoder: Decoder, shape: ModelShape, rng: np.random.Generator) -> None:
    """Writes the induction circuit: a previous-token head in layer 0, matching heads in layers 1 and 2."""
    circuit = Circuit(shape.vocab_size, shape.hidden_size, shape.head_dim, shape.rope_theta, rng)
    decoder.embed_tokens.weight.set_data(Tensor(circuit.embedding(rng)))
    add_head(decoder.layers[0].self_attn, 0, circuit.previous_token_query_key(), circuit.previous_token_value_output())
    for layer in list(decoder.layers)[1:3]:
        for kv_head in range(min(2, shape.num_kv_heads)):
            add_head(layer.self_attn, kv_head, circuit.induction_query_key(kv_head), circuit.copy_value_output(rng))


class TinyLlama(nn.Cell):
    """The language model for rows of at most ``length`` tokens. The output layer shares the embedding's matrix."""

    def __init__(self, shape: ModelShape, length: int, seed: int) -> None:
        super().__init__()
        self.group = shape.num_heads // shape.num_kv_heads
        rng = np.random.default_rng(seed)
        self.model = Decoder(shape, rng)
        install_circuit(self.model, shape, rng)
        cos, sin = rotary_tables(shape, length)
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        self.causal = Tensor(np.tril(np.ones((length, length), np.float32)))
        self.head = P.MatMul(transpose_b=True)
        self.cross_entropy = P.SparseSoftmaxCrossEntropyWithLogits()

    def mask(self, documents: Tensor) -> Tensor:
        """Returns the additive mask: a token sees itself and the earlier tokens of its document."""
        same = (documents.expand_dims(2) == documents.expand_dims(1)).astype(ms.float32)
        length = documents.shape[1]
        mask = (same * self.causal[:length, :length] - 1.0) * 1e9
        return ops.tile(mask, (1, self.group, 1)).expand_dims(1)

    def logits(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """Maps token ids, int32 ``[batch, length]``, to logits ``[batch * length, vocab]``.

        A token attends only to tokens with the same number in ``documents``, int32 ``[batch, length]``.
        """
        batch, length = tokens.shape
        mask = self.mask(documents)
        cos, sin = self.cos[:length], self.sin[:length]
        x = ops.gather(self.model.embed_tokens.weight, tokens.reshape(-1), 0)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, batch)
        return self.head(self.model.norm(x), self.model.embed_tokens.weight)

    def construct(self, tokens: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross-entropy of ``labels`` (int32 ``[batch, length]``) in nats per token."""
        logits = self.logits(tokens, documents)
        return self.cross_entropy(logits, labels.reshape(-1))
