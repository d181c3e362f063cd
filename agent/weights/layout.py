"""Describes the parameters of a model, and the checkpoint tensors from which each parameter is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llm_serving.model.parallel import Span

WeightKind = Literal["plain", "linear", "gated_linear"]
"""``plain`` parameters (norms, embeddings) stay arrays of ``model_dtype``. Weights of linear layers may be packed. In a
gated linear layer, the first half of the rows is the gate and the second half is the up projection."""


@dataclass(frozen=True, slots=True)
class RowsOf:
    """The place of a tensor in a larger tensor of the checkpoint, for example of a query weight in Phi-3's qkv weight.
    """

    name: str
    shape: tuple[int, ...]
    """Name and shape of the larger tensor."""
    first: int
    """Row of the larger tensor at which the smaller tensor begins."""
    head_order: tuple[int, ...] = ()
    """For each row of a head in the model, its index among the stored rows of the head. () means the stored order."""
    stored_head: int = 0
    """Number of stored rows of each head, if ``head_order`` selects only some of them. 0 means that it selects all."""


@dataclass(frozen=True, slots=True)
class StackedIn:
    """Describes which outputs of a tensor with the weights of all experts belong to one expert's tensor.

    Folders of gpt-oss and Qwen3.5 have tensors with all experts. A folder may have a tensor for each expert instead.
    """

    name: str
    """Name of the tensor with all experts."""
    experts: int
    expert: int
    """Number of experts in this tensor, and the index of this expert."""
    outputs: int
    """Number of outputs that the tensor has for each expert."""
    first: int = 0
    step: int = 1
    """The expert's tensor has the outputs ``first``, ``first + step``, ``first + 2 * step`` and so on."""
    inputs_last: bool = False
    """True: floats are stored as [experts, out, in] (Qwen3.5). False: as [experts, in, out] (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The Hugging Face name and the shape of a checkpoint tensor, which is a part of a model's parameter."""

    name: str
    shape: tuple[int, ...]
    rows_of: RowsOf | None = None
    """The place of this tensor in a larger tensor, if the checkpoint has no tensor of this name. Otherwise None."""
    stacked: StackedIn | None = None
    """The place of this tensor in a tensor with the weights of all experts, which a folder may have instead. None if
    folders have no tensor of this kind.
    """


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Selects some rows of each head from a checkpoint tensor. The parameter then has a separate weight for each head.

    Latent attention needs this, because one checkpoint tensor has the rows for keys and values of all heads. The tensor
    has ``stride`` rows for each head, and the parameter takes ``rows`` of them.
    """

    heads: int
    stride: int
    rows: Span
    transposed: bool = False
    """True: the rows of a head are the inputs of its weight. False: they are the outputs."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Describes a parameter of the model and the checkpoint tensors (``parts``) that are joined to it.

    The tensors are joined along the first axis, for example q, k and v to one parameter qkv.
    """

    parameter: str
    parts: tuple[WeightPart, ...]
    kind: WeightKind = "plain"
    packed_only: bool = False
    """True for an output layer that has the weight of the embedding (tied). It is a separate parameter only if weights
    are packed. Otherwise it uses the embedding.
    """
    bias: tuple[WeightPart, ...] = ()
    """The bias of a linear layer, one part for each of ``parts``. A packed weight includes the bias."""
    experts: int = 0
    """Number of experts, whose parts follow each other in ``parts``. 0 means a single weight."""
    float32: bool = False
    """True for a router, which stays float32 for every ``model_dtype`` and ``weight_format``."""
    head_rows: HeadRows | None = None
    """Not None if the parameter has a separate weight for each head. ``parts`` then has one tensor, and the weights are
    floats for every ``weight_format``.
    """
    activation: str = "silu"
    """The activation of a gated linear layer. ``agent.kernels.packing.GATES`` lists the activations."""
    offset: float = 0.0
    factor: float = 1.0
    """A plain parameter is (stored value + ``offset``) x ``factor``, computed in float32."""
    padded_rows: int = 0
    """Number of rows of the parameter, if it must have more rows than its parts together. Added rows are zero."""
    input_spans: tuple[Span, ...] = ()
    """Ranges of inputs that the layer multiplies separately before it adds the products in float32. Empty means one
    product over all inputs.

    A group of agents that share the layer adds one product per agent, in the same order. So a single agent with these
    ranges gets the same bits.
    """

    @property
    def tensors(self) -> tuple[WeightPart, ...]:
        """All checkpoint tensors of this parameter: the parts of the weight, then the parts of the bias."""
        return self.parts + self.bias

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter as one array. For experts it is [experts, rows, ...]."""
        rows = max(sum(part.shape[0] for part in self.parts), self.padded_rows)
        rest = self.parts[0].shape[1:]
        return (self.experts, rows // self.experts, *rest) if self.experts else (rows, *rest)

    def expert(self, index: int) -> WeightSpec:
        """Returns the description of one expert's weight."""
        each = len(self.parts) // self.experts
        own = slice(index * each, (index + 1) * each)
        return replace(self, parts=self.parts[own], bias=self.bias[own], experts=0)

    def bias_spec(self, dtype: str) -> WeightSpec:
        """Returns the description of the bias as a separate parameter, for activations of type ``dtype``.

        With bfloat16 activations, biases of experts are float32, because GroupedMatmulV4 requires this.
        """
        name, in_float32 = f"{self.parameter.removesuffix('.weight')}.bias", self.experts > 0 and dtype == "bfloat16"
        return WeightSpec(name, self.bias, experts=self.experts, float32=self.float32 or in_float32)


def rows_of(parts: Sequence[WeightPart]) -> Iterator[tuple[WeightPart, slice]]:
    """Yields each part of a parameter, with the range of the parameter's rows that this part fills. ``parts`` follow
    each other along the first axis."""
    row = 0
    for part in parts:
        yield part, slice(row, row + part.shape[0])
        row += part.shape[0]
