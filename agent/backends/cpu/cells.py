"""The Cells of the fused op table. Each Cell calls one custom operator, which ``agent.backends.cpu.ops`` makes.

``agent.backends.base.OpTable`` describes the inputs and outputs of each Cell. The Cell adds constants, such as epsilon,
and the step's ``counts``. Then it passes all arguments in the order that the custom operator expects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from agent.backends.base import AttentionForm, LatentForm, Operator
from agent.layers.parameter import as_tensor, bind, unbound_parameter
from agent.sequence_states import SequenceStates
from agent.weights.storage import Array
from llm_serving.model.deepseek import Routing
from llm_serving.model.families import Experts
from llm_serving.model.gated_delta import GatedDelta


class Embedding(nn.Cell):
    """Looks up the row of the embedding table for each token id."""

    def __init__(self, embed: Operator) -> None:
        super().__init__()
        self.embed = embed

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.embed(token_ids, table, step[4])


class ShardedEmbedding(nn.Cell):
    """Looks up token ids in an embedding table whose rows are divided among agents, and sums the agents' results."""

    def __init__(self, embed: Operator, vocabulary: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = embed
        self.vocabulary = _integers("vocabulary", vocabulary)

    def construct(self, table: Tensor, token_ids: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.embed(token_ids, table, self.vocabulary, step[4])


class Sum(nn.Cell):
    """Adds the agents' parts of a result, for layers that are divided among agents (all-reduce)."""

    def __init__(self, all_reduce: Operator) -> None:
        super().__init__()
        self.all_reduce = all_reduce

    def construct(self, x: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.all_reduce(x, step[4])


class HandOver(nn.Cell):
    """Ends a pipeline stage: writes hidden + residual to the array ``stream``.

    Returns only the number of the step (``counts[3]``).
    """

    def __init__(self, hand_over: Operator, stream: Array, dtype: str) -> None:
        super().__init__()
        self.hand_over = hand_over
        self.stream = unbound_parameter(stream.shape, dtype)
        bind(self.stream, stream)

    def construct(self, hidden: Tensor, residual: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.hand_over(hidden, residual, self.stream, step[4])


class Linear(nn.Cell):
    """A linear layer with a packed weight, which includes the bias."""

    def __init__(self, linear: Operator) -> None:
        super().__init__()
        self.linear = linear

    def construct(self, x: Tensor, weight: Tensor, bias: None, step: tuple[Tensor, ...]) -> Tensor:
        return self.linear(x, weight, step[4])


class NormLinear(nn.Cell):
    """Applies the norm and a linear layer at the beginning of a stage, where no residual exists yet.

    The model passes the input of the stage as ``hidden`` and also as ``residual``.
    """

    def __init__(self, norm_linear: Operator, epsilon: float) -> None:
        super().__init__()
        self.norm_linear = norm_linear
        self.epsilon = _epsilon(epsilon)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, bias: None, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        return self.norm_linear(hidden, gamma, self.epsilon, weight, step[4]), residual


class AddNormLinear(nn.Cell):
    """Adds hidden and residual, applies the norm and a linear layer. Returns the layer's output and the sum."""

    def __init__(self, norm_linear: Operator, epsilon: float) -> None:
        super().__init__()
        self.norm_linear = norm_linear
        self.epsilon = _epsilon(epsilon)

    def construct(
        self, hidden: Tensor, residual: Tensor, gamma: Tensor, weight: Tensor, bias: None, step: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        out, total = self.norm_linear(hidden, residual, gamma, self.epsilon, weight, step[4])
        return out, total


class JoinNorms(nn.Cell):
    """Applies RMSNorm to each of two matrices, and joins the two results along the columns.

    The operator ``JoinNormsKeepSecond`` also gives the second result alone.
    """

    def __init__(self, join_norms: Operator, epsilon: float) -> None:
        super().__init__()
        self.join_norms = join_norms
        self.epsilon = _epsilon(epsilon)

    def construct(
        self, first: Tensor, second: Tensor, first_gamma: Tensor, second_gamma: Tensor, step: tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self.join_norms(first, second, first_gamma, second_gamma, self.epsilon, step[4])


class GatedMLP(nn.Cell):
    """Adds hidden and residual, applies the norm and the gated MLP. Returns the MLP's output and the sum."""

    def __init__(self, mlp: Operator, epsilon: float) -> None:
        super().__init__()
        self.mlp = mlp
        self.epsilon = _epsilon(epsilon)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        gate_up: Tensor,
        down: Tensor,
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        out, total = self.mlp(hidden, residual, gamma, self.epsilon, gate_up, down, step[4])
        return out, total


class DecoderLayers(nn.Cell):
    """Runs several decoder layers. All norms, also those of query and key heads, have the same epsilon."""

    def __init__(
        self, layers: Operator, epsilon: float, form: AttentionForm, count: int, *, result_norms: bool
    ) -> None:
        super().__init__()
        assert form.norm_epsilon in (None, epsilon), "one epsilon for all norms of a layer"
        self.layers = layers
        self.epsilon = _epsilon(epsilon)
        norms = (int(form.norm_epsilon is not None), int(result_norms))
        self.form = _integers("form", (count, form.window, *norms))

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        layers: tuple[tuple[Tensor, ...], ...],
        rotary: tuple[Tensor, Tensor, Tensor],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        arguments: tuple[Any, ...] = (self.form, self.epsilon, *rotary, *step)
        for layer in layers:
            arguments = (*arguments, *layer)
        hidden, residual = self.layers(hidden, residual, *arguments)
        return hidden, residual


class ExpertMLP(nn.Cell):
    """Adds hidden and residual, applies the norm, the expert router and the chosen experts.

    Returns the experts' output and the sum.
    """

    def __init__(self, mlp: Operator, experts: Experts, epsilon: float) -> None:
        super().__init__()
        self.mlp = mlp
        self.epsilon = _epsilon(epsilon)
        choice = np.array([experts.count, experts.per_token, experts.normalised], np.int32)
        self.choice = Parameter(as_tensor(choice), name="choice", requires_grad=False)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        router, gate_up, down = weights
        out, total = self.mlp(hidden, residual, gamma, self.epsilon, router, gate_up, down, self.choice, step[4])
        return out, total


class RoutedExpertMLP(nn.Cell):
    """An ``ExpertMLP`` with more arguments: for DeepSeek's router, for shared experts, or for an agent with only some
    experts.
    """

    def __init__(self, mlp: Operator, experts: Experts, epsilon: float) -> None:
        super().__init__()
        routing = experts.routing or Routing()
        self.mlp = mlp
        self.epsilon = _epsilon(epsilon)
        self.choice = _integers("choice", (experts.count, experts.per_token, int(experts.normalised)))
        groups = (int(routing.sigmoid), routing.groups, routing.chosen_groups, int(routing.corrected))
        self.routing = _integers("routing", (*groups, experts.first_held, experts.held))
        self.factor = Parameter(as_tensor(np.full(1, routing.factor, np.float32)), name="factor", requires_grad=False)
        self.is_corrected = routing.corrected
        zeros = np.zeros(experts.count, np.float32)
        self.no_correction = Parameter(as_tensor(zeros), name="no_correction", requires_grad=False)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weights: tuple[Tensor, ...],
        step: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        correction = weights[3] if self.is_corrected else self.no_correction
        shared = weights[4:] if self.is_corrected else weights[3:]
        arguments = (gamma, self.epsilon, *weights[:3], self.choice, step[4], self.routing, self.factor, correction)
        out, total = self.mlp(hidden, residual, *arguments, *shared)
        return out, total


class LMHead(nn.Cell):
    """Writes the logits to the array ``logits``, and each sequence's best token to the array ``best_ids``.

    Returns only the number of the step (``counts[3]``). ``FusedCpuOps`` describes both arrays.

    If agents share the vocabulary, ``vocabulary`` describes the part of this agent (``FusedCpuOps._vocabulary``). The
    first agent's ``logits`` then get the columns of all agents. Otherwise ``vocabulary`` is None.
    """

    def __init__(
        self, head: Operator, epsilon: float, logits: Array, best_ids: Array, vocabulary: tuple[int, ...] | None
    ) -> None:
        super().__init__()
        self.head = head
        self.epsilon = _epsilon(epsilon)
        self.vocabulary = None if vocabulary is None else _integers("vocabulary", vocabulary)
        self.logits = unbound_parameter(logits.shape, "float32")
        bind(self.logits, logits)
        self.best_ids = unbound_parameter(best_ids.shape, "int32")
        bind(self.best_ids, best_ids)

    def construct(
        self,
        hidden: Tensor,
        residual: Tensor,
        gamma: Tensor,
        weight: Tensor,
        last_tokens: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        arguments: tuple[Any, ...] = (gamma, self.epsilon, weight, last_tokens, self.logits, self.best_ids)
        if self.vocabulary is not None:
            arguments = (*arguments, self.vocabulary)
        return self.head(hidden, residual, *arguments, step[4])


class RotaryTables(nn.Cell):
    """Returns the positions and the whole float32 tables of cosines and sines. The attention operator looks up the rows
    of the tables.
    """

    def __init__(self, cos: Array, sin: Array) -> None:
        super().__init__()
        self.cos = Parameter(as_tensor(cos), name="cos", requires_grad=False)
        self.sin = Parameter(as_tensor(sin), name="sin", requires_grad=False)

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return positions, self.cos, self.sin


class RotaryRows(nn.Cell):
    """Returns three tensors: the numbers 0, 1, 2, ..., and the cosines and sines of the step's tokens.

    The agent has already gathered the cosines and sines, so row i belongs to token i. The attention operator looks up
    the row of each token. Therefore the operator gets the numbers of the tokens instead of their positions.
    """

    def __init__(self, cos: Array, sin: Array) -> None:
        super().__init__()
        self.cos, self.sin = (unbound_parameter(each.shape, "float32") for each in (cos, sin))
        bind(self.cos, cos)
        bind(self.sin, sin)
        numbers = np.arange(len(cos), dtype=np.int32)
        self.numbers = Parameter(as_tensor(numbers), name="numbers", requires_grad=False)

    def construct(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.numbers, self.cos, self.sin


class Attention(nn.Cell):
    """Runs norms of heads, rotary embedding, cache write and attention in one operator.

    The operator derives the numbers of heads and the scale of the scores from the shapes of its arguments. Optional
    arguments come last: the attention window, then either the sinks, or the gammas and the epsilon of the head norms.
    """

    def __init__(self, attention: Operator, form: AttentionForm) -> None:
        super().__init__()
        self.attention = attention
        self.window = _window(form)
        self.has_sinks = form.sinks
        self.epsilon = None if form.norm_epsilon is None else _epsilon(form.norm_epsilon)

    def construct(
        self,
        qkv: Tensor,
        of_heads: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        step: tuple[Tensor, ...],
        whole_prompts: bool,
    ) -> Tensor:
        arguments = (*rotary, *caches, *step)
        if self.window is not None:
            arguments = (*arguments, self.window)
        if self.epsilon is not None:
            arguments = (*arguments, *of_heads, self.epsilon)
        elif self.has_sinks:
            arguments = (*arguments, *of_heads)
        return self.attention(qkv, *arguments)


class LatentAttention(nn.Cell):
    """Runs norms, products of queries, rotary embedding, cache write and attention over latent vectors in one operator.
    """

    def __init__(self, attention: Operator, form: LatentForm) -> None:
        super().__init__()
        sizes = form.latent
        self.attention = attention
        widths = (form.num_heads, sizes.query_rank, sizes.nope_dim, sizes.value_dim, int(sizes.interleaved))
        self.form = _integers("form", widths)
        numbers = np.array([form.norm_epsilon, sizes.score_factor * sizes.head_dim**-0.5], np.float32)
        self.numbers = Parameter(as_tensor(numbers), name="numbers", requires_grad=False)

    def construct(
        self,
        joined: Tensor,
        weights: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor, Tensor],
        cache: Tensor,
        step: tuple[Tensor, ...],
    ) -> Tensor:
        return self.attention(joined, self.form, self.numbers, *rotary, cache, *step, *weights)


class SigmoidGate(nn.Cell):
    """Multiplies each element by the sigmoid of its gate."""

    def __init__(self, gate: Operator) -> None:
        super().__init__()
        self.gate = gate

    def construct(self, x: Tensor, gate: Tensor, step: tuple[Tensor, ...]) -> Tensor:
        return self.gate(x, gate, step[4])


class GatedDeltaNet(nn.Cell):
    """Runs convolution, recurrence, norm and output gate of linear attention in one operator.

    ``states`` divides the tokens of a step into runs. A run is consecutive tokens of one sequence.
    """

    def __init__(self, operator: Operator, delta: GatedDelta, epsilon: float, states: SequenceStates) -> None:
        super().__init__()
        self.operator = operator
        sizes = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps, states.max_logged)
        self.form = _integers("form", sizes)
        self.epsilon = _epsilon(epsilon)
        self.runs = unbound_parameter(states.runs.shape, "int32")
        bind(self.runs, states.runs)

    def construct(
        self, projected: Tensor, weights: tuple[Tensor, ...], states: Tensor, step: tuple[Tensor, ...]
    ) -> Tensor:
        return self.operator(projected, self.form, self.epsilon, *weights, states, self.runs, step[4])


def _window(form: AttentionForm) -> Parameter | None:
    """Returns the operator's argument for the attention window. The value 0 means that there is no window.

    Returns None if the operator does not need this argument: the layer has no window, no sinks and no head norms. The
    arguments for sinks and head norms come after the window, so they need it.
    """
    if form.window == 0 and form.norm_epsilon is None and not form.sinks:
        return None
    return Parameter(as_tensor(np.full(1, form.window, np.int32)), name="window", requires_grad=False)


def _integers(name: str, values: tuple[int, ...]) -> Parameter:
    return Parameter(as_tensor(np.array(values, np.int32)), name=name, requires_grad=False)


def _epsilon(value: float) -> Parameter:
    return Parameter(as_tensor(np.full(1, value, np.float32)), name="epsilon", requires_grad=False)
