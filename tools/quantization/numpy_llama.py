"""A Llama's forward pass in NumPy and float32, layer by layer, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from agent.layers.rotary import rotary_tables
from llm_serving.model.shape import ModelShape

Float32Array = NDArray[np.float32]
Apply = Callable[[str, Float32Array], Float32Array]
"""Type of functions that multiply inputs [tokens, in] by the weight of a named linear layer, such as
``self_attn.q_proj``.
"""
Observe = Callable[[tuple[str, ...], Float32Array], None]
"""Type of functions that get the names of linear layers and the inputs [tokens, in] that these layers share."""


class NumpyLlama:
    """Runs one decoder layer at a time. The caller passes the layer's weights, so only one layer must be in memory."""

    def __init__(self, shape: ModelShape, length: int) -> None:
        self._shape = shape
        self._cos, self._sin = rotary_tables(shape, length)
        self._mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def layer(
        self, hidden: Float32Array, weights: Mapping[str, Float32Array], apply: Apply, observe: Observe
    ) -> Float32Array:
        """Returns the output of a decoder layer for ``hidden``, both [sequences, length, hidden].

        ``weights`` has the weights of the norms. ``apply(name, x)`` multiplies the inputs x of a linear layer by its
        weight. Before that, ``observe(names, x)`` gets the same inputs and the names of all linear layers that use
        them.
        """
        sequences, length, width = hidden.shape
        flat = hidden.reshape(-1, width)
        x = self._norm(flat, weights["input_layernorm"])
        observe(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), x)
        q, k, v = (apply(f"self_attn.{name}_proj", x) for name in "qkv")
        attended = np.concatenate(
            [self._attention(*(each[i * length : (i + 1) * length] for each in (q, k, v))) for i in range(sequences)]
        )
        observe(("self_attn.o_proj",), attended)
        flat = flat + apply("self_attn.o_proj", attended)
        x = self._norm(flat, weights["post_attention_layernorm"])
        observe(("mlp.gate_proj", "mlp.up_proj"), x)
        gate, up = apply("mlp.gate_proj", x), apply("mlp.up_proj", x)
        inner = gate / (1 + np.exp(-np.maximum(gate, -80))) * up
        observe(("mlp.down_proj",), inner)
        return (flat + apply("mlp.down_proj", inner)).reshape(hidden.shape)

    def logits(self, hidden: Float32Array, norm: Float32Array, output: Float32Array) -> Float32Array:
        """Returns the logits [..., vocabulary] of ``hidden`` [..., hidden]."""
        return self._norm(hidden, norm) @ output.T

    def _norm(self, x: Float32Array, gamma: Float32Array) -> Float32Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return (x / np.sqrt(mean + np.float32(self._shape.rms_norm_eps)) * gamma).astype(np.float32)

    def _attention(self, q: Float32Array, k: Float32Array, v: Float32Array) -> Float32Array:
        """Returns the attention output of one sequence, shaped like ``q``.

        ``q`` is [length, heads * head size]; ``k`` and ``v`` are [length, kv heads * head size].
        """
        shape, length = self._shape, len(q)
        size, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        query = self._rotate(q.reshape(length, -1, size).swapaxes(0, 1)) * np.float32(size**-0.5)
        key = self._rotate(k.reshape(length, -1, size).swapaxes(0, 1)).repeat(group, axis=0)
        value = v.reshape(length, -1, size).swapaxes(0, 1).repeat(group, axis=0)
        scores = query @ key.swapaxes(1, 2) + self._mask[:length, :length]
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.ascontiguousarray((weights @ value).swapaxes(0, 1)).reshape(length, -1)

    def _rotate(self, x: Float32Array) -> Float32Array:
        """Applies the rotary embedding (rotate-half) to ``x`` [heads, length, head size]."""
        half, length = x.shape[2] // 2, x.shape[1]
        turned = np.concatenate([-x[:, :, half:], x[:, :, :half]], axis=2)
        return x * self._cos[:length] + turned * self._sin[:length]
