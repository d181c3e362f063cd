"""Creates initial weights that contain an induction circuit.

One head attends to the previous token. In the next layer, other heads look for the token that followed an earlier
occurrence of the current token. This is how a transformer copies from its context (Elhage et al., 2021; Olsson et al.,
2022). With random initial weights, a model needs tens of millions of tokens to learn this circuit. Two processor cores
cannot process that number in an hour. Therefore the initial weight matrices already contain the circuit. Training can
keep, change or remove it (mimetic initialization, Trockman and Kolter, 2023). All other weights are random and small.

An embedding is a random vector of norm 1 plus a vector of norm ``COMMON``. This second vector is the same for all
tokens, so each layer can use it as a constant input. ``WRITTEN`` scales the output of a head of the circuit.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
HeadWeights = tuple[Matrix, Matrix]
"""Two weight matrices of a head: (query, key) or (value, output)."""

COMMON = 0.5
"""Norm of the vector that all embeddings share."""
WRITTEN = 0.14
"""Scale of the output of a head of the circuit."""
SHARPNESS = (10.0, 8.0, 6.0, 4.0, 2.0, 1.0)
"""Weight of each rotary frequency, the fastest first, in the attention scores of the previous-token head."""
MATCH_GAIN = 2.0
"""Scale of the queries and keys of the heads that look for an earlier occurrence of the current token."""


class Circuit:
    """The vectors that the heads of the circuit share.

    ``constant`` is a part of every embedding. ``code`` [head_dim, hidden] is a random projection. It maps a token's
    embedding to a shorter vector, the token's code. ``place`` [hidden, head_dim] has the directions in the hidden state
    along which the previous-token head writes the code.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, head_dim: int, rope_theta: float, rng: np.random.Generator
    ) -> None:
        self.vocab_size, self.hidden_size, self.head_dim = vocab_size, hidden_size, head_dim
        self.rope_theta = rope_theta
        self.constant = rng.standard_normal(hidden_size) / np.sqrt(hidden_size)
        self.code = rng.standard_normal((head_dim, hidden_size)) / np.sqrt(hidden_size)
        self.place = np.linalg.qr(rng.standard_normal((hidden_size, head_dim)))[0]

    def embedding(self, rng: np.random.Generator) -> Matrix:
        """Returns the embedding [vocab, hidden]: random vectors of norm 1, plus the same constant for every token."""
        vocab, hidden = self.vocab_size, self.hidden_size
        return as_float32(rng.standard_normal((vocab, hidden)) / np.sqrt(hidden) + COMMON * self.constant)

    def previous_token_query_key(self) -> HeadWeights:
        """Returns the query and key weights, both [head_dim, hidden], of a head that attends to the previous token.

        The key is the same for all tokens. The query is this key, rotated back by one position.
        """
        dim, half = self.head_dim, self.head_dim // 2
        angles = self.rope_theta ** (-np.arange(half) / half)
        energy = np.zeros(half)
        energy[: len(SHARPNESS)] = SHARPNESS[:half]
        length = np.sqrt(energy * np.sqrt(dim))
        key = np.concatenate([length, np.zeros(half)])
        query = np.concatenate([length * np.cos(angles), -length * np.sin(angles)])
        constant_after_norm = np.sqrt(self.hidden_size) * COMMON / np.sqrt(1 + COMMON**2)
        read = self.constant / constant_after_norm
        return as_float32(np.outer(query, read)), as_float32(np.outer(key, read))

    def previous_token_value_output(self) -> HeadWeights:
        """Returns the value [head_dim, hidden] and output [hidden, head_dim] weights of the previous-token head.

        The value maps the previous token's embedding to its code (``Circuit.code``). The output writes the code to the
        directions ``place`` of the hidden state.
        """
        return as_float32(self.code), as_float32(self.place * WRITTEN)

    def induction_query_key(self, half: int) -> HeadWeights:
        """Returns the query and key weights of a head that looks for earlier occurrences of the current token.

        The query contains the current token's code. The key of a position contains the code that the previous-token
        head wrote there, which is the code of the token before.

        Only the slow half of the rotary frequencies is used, so that the match does not depend on the distance.
        ``half`` (0 or 1) selects the half of the code that is compared.
        """
        dim = self.head_dim
        quarter = dim // 4
        slow = np.concatenate([np.arange(quarter, dim // 2), np.arange(dim // 2 + quarter, dim)])
        part = slice(half * dim // 2, half * dim // 2 + len(slow))
        query, key = np.zeros((dim, self.hidden_size)), np.zeros((dim, self.hidden_size))
        query[slow] = MATCH_GAIN * self.code[part]
        key[slow] = MATCH_GAIN * self.place.T[part]
        return as_float32(query), as_float32(key)

    def copy_value_output(self, rng: np.random.Generator) -> HeadWeights:
        """Returns value and output weights of a head that copies (a projection of) the attended token."""
        hidden, dim = self.hidden_size, self.head_dim
        value = rng.standard_normal((dim, hidden)) / np.sqrt(hidden)
        return as_float32(value), as_float32(value.T * WRITTEN)


def as_float32(values: NDArray[np.float64]) -> Matrix:
    """Returns the values as float32."""
    return values.astype(np.float32)
