"""Implements matrix products of the native op table, for float or integer weights (``agent.weights.forms``)."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import DynamicQuantExt, QuantBatchMatmul, QuantV2, WeightQuantBatchMatmul

from agent.backends.base import Operator
from agent.layers.parameter import MINDSPORE_DTYPES
from agent.weights.forms import LinearForm, scale_type


def linear_parameters(
    form: LinearForm, in_features: int, out_features: int, dtype: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns, by name, the shape and type of each parameter of a linear layer.

    The parameters are the weight and, depending on ``form``, scales and offsets (``agent.weights.forms``).
    """
    if form.is_float:
        return {"weight": ((out_features, in_features), dtype)}
    if form.quantises_activations:
        scale = scale_type(form, dtype, of_experts=False)
        integers: dict[str, tuple[tuple[int, ...], str]] = {
            "weight": ((out_features, in_features), form.weights.stored_as),
            "scale": ((out_features,), scale),
        }
        if form.is_static:
            integers |= dict.fromkeys(("input_scale", "input_offset"), ((in_features,), dtype))
            integers["sum_offset"] = ((out_features,), "int32")
        return integers
    scales, per_byte = _scale_shape(form, in_features, out_features), form.weights.values_per_byte
    shape = (out_features, in_features) if is_transposed(form) else (in_features, out_features // per_byte)
    found = {"weight": (shape, form.weights.stored_as), "scale": (scales, dtype)}
    return found | {"offset": (scales, dtype)} if form.has_offsets else found


def expert_parameters(
    form: LinearForm, experts: int, in_features: int, out_features: int, dtype: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns, by name, the shape and type of each parameter of one linear layer of all experts.

    The parameters are the weight and, depending on ``form``, scale and offset, as ``GroupedMatmulV4`` takes them.
    """
    if form.is_float:
        return {"weight": ((experts, in_features, out_features), dtype)}
    weight = ((experts, in_features, out_features // form.weights.values_per_byte), form.weights.stored_as)
    rows = (in_features // form.group, out_features) if form.group else (out_features,)
    scale = ((experts, *rows), scale_type(form, dtype, of_experts=True))
    found = {"weight": weight, "scale": scale}
    return found | {"offset": scale} if form.has_offsets else found


def expert_bias_type(dtype: str) -> str:
    """Returns the type of the experts' biases that GroupedMatmulV4 takes for activations of ``dtype``."""
    return "float32" if dtype == "bfloat16" else dtype


def is_transposed(form: LinearForm) -> bool:
    """Returns True if the weight is stored as [out, in], and False if it is stored as [in, out].

    Only 4-bit weights are [in, out]. Each of their bytes has the integers of two outputs.
    """
    return form.is_float or form.weights.values_per_byte == 1


def _scale_shape(form: LinearForm, in_features: int, out_features: int) -> tuple[int, ...]:
    """Returns the shape of a weight's scales.

    Without groups of inputs, the shape is [out]. With groups it is [out, groups] for a transposed weight, else
    [groups, out].
    """
    if form.group == 0:
        return (out_features,)
    groups = -(-in_features // form.group)
    return (out_features, groups) if is_transposed(form) else (groups, out_features)


def matrix_product(form: LinearForm, dtype: str) -> Operator:
    """Returns an operator (x [tokens, in], weight) -> the product [tokens, out].

    ``LinearParameters`` describes the weight, with its scales and offsets.
    """
    if form.is_float:
        return ops.MatMul(transpose_b=True)
    if form.is_static:
        return _StaticProduct(dtype)
    return _DynamicProduct(dtype) if form.quantises_activations else _WeightOnlyProduct(form)


class _DynamicProduct(nn.Cell):
    """Multiplies tokens by an integer weight. First quantises the tokens to int8, with one scale for each token."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.quantise = DynamicQuantExt()
        self.multiply = QuantBatchMatmul(transpose_x1=False, transpose_x2=True, dtype=MINDSPORE_DTYPES[dtype])

    def construct(self, x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        integers, scales = self.quantise(x, None)
        return self.multiply(integers, weight[0], weight[1], None, None, scales)


class _StaticProduct(nn.Cell):
    """Multiplies tokens by an integer weight. First quantises the tokens to int8, with the same scales and offsets for
    all tokens.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.quantise = QuantV2()
        self.multiply = QuantBatchMatmul(transpose_x1=False, transpose_x2=True, dtype=MINDSPORE_DTYPES[dtype])

    def construct(self, x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
        integers = self.quantise(x, weight[2], weight[3], False, "ROUND", ms.int8)
        return self.multiply(integers, weight[0], weight[1], None, weight[4], None)


class _WeightOnlyProduct(nn.Cell):
    """Multiplies float tokens by an integer weight. The primitive converts the weight to floats."""

    def __init__(self, form: LinearForm) -> None:
        super().__init__()
        self.multiply = WeightQuantBatchMatmul(
            transpose_x=False, transpose_weight=is_transposed(form), antiquant_group_size=form.group
        )

    def construct(self, x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
        offset = weight[2] if len(weight) > 2 else None
        return self.multiply(x, weight[0], weight[1], offset, None, None, None)
