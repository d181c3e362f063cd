"""A Llama in NumPy, which computes whole sequences.

Its linear layers may be int8. The arithmetic between them is exact, or its results are rounded to a type after each
operator. The model shares no code with the operators that agents use.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent.layers.rotary import rotary_tables
from agent.weights.storage import from_float32, to_float32
from agent.weights.tensor_files import TensorFiles
from llm_serving.model.shape import ModelShape

Floats = npt.NDArray[np.float32]

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class NumpyLlama:
    """The model of a folder.

    ``weights`` states the format of the linear layers: ``float``, ``int8`` (activations are quantised token by token)
    or ``int8_weight_only``. Each output of an int8 layer has one scale, of type ``scale_dtype``. All other weights are
    floats of type ``dtype``. With tied weights, the embedding is also the output layer. Then ``float_tied`` states that
    the output layer is not quantised.
    """

    def __init__(
        self, folder: Path, weights: str, dtype: str, *, scale_dtype: str = "float32", float_tied: bool = False
    ) -> None:
        self._shape = ModelShape.from_hf_folder(folder)
        self._quantises_rows = weights == "int8"
        self._weights: dict[str, Floats] = {}
        self._scales: dict[str, Floats] = {}
        stored = _stored(folder)
        tied = stored.setdefault(_OUTPUT, stored[_EMBEDDING]) is stored[_EMBEDDING]
        for name, values in stored.items():
            stays = values.ndim == 1 or name == _EMBEDDING or (name == _OUTPUT and tied and float_tied)
            if weights == "float" or stays:
                self._weights[name] = rounded(values, dtype)
            else:
                self._weights[name], self._scales[name] = _quantised(values, scale_dtype)

    def logits(self, tokens: list[int], between: str = "float32", logits_type: str = "float32") -> Floats:
        """Returns the logits [tokens, vocabulary] after each token.

        The results of operators are rounded to the type ``between``. The logits are rounded to ``logits_type``.
        """
        return rounded(self._linear(self.hidden(tokens, between), "lm_head"), logits_type)

    def hidden(self, tokens: list[int], between: str = "float32") -> Floats:
        """Returns the hidden states after the last norm [tokens, hidden_size].

        The results of operators are rounded to the type ``between``.
        """
        shape, length = self._shape, len(tokens)
        residual = self._weights[_EMBEDDING][tokens]
        cos, sin = (table[:, None, :] for table in rotary_tables(shape, length))
        for index in range(shape.num_layers):
            name = f"model.layers.{index}"
            x = self._norm(residual, f"{name}.input_layernorm", between)
            query, key, value = (
                rounded(self._linear(x, f"{name}.self_attn.{part}_proj"), between).reshape(length, -1, shape.head_dim)
                for part in "qkv"
            )
            query, key = (rounded(_rotate(heads, cos, sin), between) for heads in (query, key))
            attended = rounded(_attention(query, key, value, between), between).reshape(length, -1)
            hidden = rounded(self._linear(attended, f"{name}.self_attn.o_proj"), between)
            residual = rounded(residual + hidden, between)
            x = self._norm(residual, f"{name}.post_attention_layernorm", between)
            gate, up = (rounded(self._linear(x, f"{name}.mlp.{part}_proj"), between) for part in ("gate", "up"))
            gated = rounded(rounded(gate / (1 + np.exp(-gate)), between) * up, between)
            residual = rounded(residual + rounded(self._linear(gated, f"{name}.mlp.down_proj"), between), between)
        return self._norm(residual, "model.norm", between)

    def rows(self, tokens: list[int]) -> Floats:
        """Returns the rows of the output layer for some tokens [tokens, hidden_size]."""
        return self._weights[_OUTPUT][tokens]

    def _norm(self, x: Floats, name: str, between: str) -> Floats:
        inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self._shape.rms_norm_eps))
        return rounded(x * inverse * self._weights[f"{name}.weight"], between)

    def _linear(self, x: Floats, name: str) -> Floats:
        weight, scale = self._weights[f"{name}.weight"], self._scales.get(f"{name}.weight")
        if scale is None:
            return x @ weight.T
        if not self._quantises_rows:
            return x @ weight.T * scale
        largest = np.abs(x).max(axis=-1, keepdims=True)
        return np.rint(x * (127 / largest)) @ weight.T * (largest / 127) * scale


def rounded(values: Floats, dtype: str) -> Floats:
    """Rounds to the nearest value of ``dtype``."""
    return to_float32(from_float32(np.ascontiguousarray(values, np.float32), dtype), dtype)


def _quantised(values: Floats, scale_dtype: str) -> tuple[Floats, Floats]:
    """Returns quantised weights as integers [outputs, inputs] in float type, and their scales [outputs]."""
    scales = rounded(np.abs(values).max(axis=1) / np.float32(127), scale_dtype)
    return np.clip(np.rint(values * (1 / scales)[:, None]), -127, 127), scales


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def _attention(query: Floats, key: Floats, value: Floats, between: str) -> Floats:
    """Returns causal attention [tokens, heads, head dim].

    The query is [tokens, heads, head dim]. Key and value are [tokens, key-value heads, head dim].
    """
    times = query.shape[1] // key.shape[1]
    keys, values = (np.repeat(x, times, axis=1).transpose(1, 0, 2) for x in (key, value))
    scores = query.transpose(1, 0, 2) @ keys.transpose(0, 2, 1) / np.float32(np.sqrt(query.shape[2]))
    scores += np.triu(np.full(scores.shape[1:], -np.inf, np.float32), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    attended: Floats = (rounded(weights, between) @ values / total).transpose(1, 0, 2)
    return attended


def _stored(folder: Path) -> dict[str, Floats]:
    """Returns all tensors of the folder, converted to float32 without rounding."""
    files = TensorFiles(folder)
    stored = {name: to_float32(*files.read(name)).copy() for name in files.names()}
    files.close()
    return stored
