"""Matrix products of the native op table, with weights of floats or integers (``agent.weights.forms``)."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import DynamicQuantExt, QuantBatchMatmul, WeightQuantBatchMatmul

from agent.backends.base import Operator
from agent.layers.parameter import MINDSPORE_DTYPES
from agent.weights.forms import LinearForm, scale_type


def linear_parameters(
    form: LinearForm, in_features: int, out_features: int, dtype: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of ``weight``, ``scale`` and ``offset``, those that the form has."""
    if form.format == "float":
        return {"weight": ((out_features, in_features), dtype)}
    if form.format == "int8":
        scale = scale_type(form, dtype, of_experts=False)
        return {"weight": ((out_features, in_features), "int8"), "scale": ((out_features,), scale)}
    scales = _scale_shape(form, in_features, out_features)
    weight = ((out_features, in_features), "int8")
    if form.format == "int4":
        weight = ((in_features, out_features // 2), "int4")
    found = {"weight": weight, "scale": (scales, dtype)}
    return found | {"offset": (scales, dtype)} if form.has_offsets else found


def expert_parameters(
    form: LinearForm, experts: int, in_features: int, out_features: int, dtype: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """The same of a layer of all experts, as ``GroupedMatmulV4`` takes them."""
    if form.format == "float":
        return {"weight": ((experts, in_features, out_features), dtype)}
    weight = ((experts, in_features, out_features), "int8")
    if form.format == "int4":
        weight = ((experts, in_features, out_features // 2), "int4")
    rows = (in_features // form.group, out_features) if form.group else (out_features,)
    scale = ((experts, *rows), scale_type(form, dtype, of_experts=True))
    found = {"weight": weight, "scale": scale}
    return found | {"offset": scale} if form.has_offsets else found


def _scale_shape(form: LinearForm, in_features: int, out_features: int) -> tuple[int, ...]:
    """The groups lie along the same axis as the inputs of the weight."""
    if form.group == 0:
        return (out_features,)
    groups = -(-in_features // form.group)
    return (groups, out_features) if form.format == "int4" else (out_features, groups)


def matrix_product(form: LinearForm, dtype: str) -> Operator:
    """(x [T, in], weight as ``OpTable.linear`` takes it) -> [T, out]."""
    if form.format == "float":
        return ops.MatMul(transpose_b=True)
    return _DynamicProduct(dtype) if form.format == "int8" else _WeightOnlyProduct(form)


class _DynamicProduct(nn.Cell):
    """Activations are quantised, a scale a token, and integers multiplied by integers."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.quantise = DynamicQuantExt()
        self.multiply = QuantBatchMatmul(transpose_x1=False, transpose_x2=True, dtype=MINDSPORE_DTYPES[dtype])

    def construct(self, x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        integers, scales = self.quantise(x, None)
        return self.multiply(integers, weight[0], weight[1], None, None, scales)


class _WeightOnlyProduct(nn.Cell):
    """Integers become floats where they are multiplied; activations stay floats."""

    def __init__(self, form: LinearForm) -> None:
        super().__init__()
        self.multiply = WeightQuantBatchMatmul(
            transpose_x=False, transpose_weight=form.format != "int4", antiquant_group_size=form.group
        )

    def construct(self, x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
        offset = weight[2] if len(weight) > 2 else None
        return self.multiply(x, weight[0], weight[1], offset, None, None, None)
