"""Checks matrix products with weights, which are floats or integers in the layouts of ``agent.weights.forms``."""

from __future__ import annotations

from collections.abc import Iterator

from agent.backends.native.linear import is_transposed, linear_parameters
from agent.weights.forms import LinearForm, LinearForms
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType

TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "int32": "i32", "int8": "i8", "int4": "i4"}
"""Maps the names of types in ``agent.weights.storage`` to the short names in a listing."""
PRODUCTS = ("MatMul", "QuantBatchMatmul", "WeightQuantBatchMatmul")
"""Primitives of matrix products with weights."""


def product_of(form: LinearForm) -> str:
    """Returns the primitive that multiplies by a weight of ``form``."""
    if form.is_float:
        return "MatMul"
    return "QuantBatchMatmul" if form.quantises_activations else "WeightQuantBatchMatmul"


class ProductRules:
    """Finds errors in the matrix products with the weights of linear layers."""

    def __init__(self, wiring: Wiring, forms: LinearForms, dtype: str) -> None:
        """``dtype`` is the type of the activations, as in ``model_dtype``."""
        self._wiring, self._forms, self._dtype = wiring, forms, dtype

    def form_of(self, node: Node) -> LinearForm:
        """Returns the form (layout) of a product's weight.

        A product outside the decoder layers belongs to the output layer.
        """
        return self._forms.output if node.layer is None else self._forms.layers

    def counts(self, products: int, *, with_output: bool) -> dict[str, int]:
        """Returns the expected number of each primitive.

        ``products`` is the number of products in the decoder layers. The output layer is one more product.
        """
        counts = dict.fromkeys([*PRODUCTS, "DynamicQuantExt", "QuantV2"], 0)
        for form, times in ((self._forms.layers, products), (self._forms.output, int(with_output))):
            counts[product_of(form)] += times
            if form.quantises_activations:
                counts["QuantV2" if form.is_static else "DynamicQuantExt"] += times
        return counts

    @property
    def hold_biases(self) -> bool:
        """True if the decoder layers need no Add for their biases.

        With static inputs, a matrix product itself adds a stored vector (the sum offsets), which includes the bias.
        """
        return self._forms.layers.holds_bias

    def problems(self, node: Node) -> Iterator[str]:
        """Yields a text for each requirement of the Ascend's kernels that the matrix product ``node`` does not meet."""
        form = self.form_of(node)
        if node.primitive != product_of(form):
            yield f"a weight of the format {form.format} must be multiplied by {product_of(form)}"
        elif form.is_float:
            yield from self._float_problems(node)
        elif form.is_static:
            yield from self._static_problems(node, form)
        elif form.quantises_activations:
            yield from self._dynamic_problems(node, form)
        else:
            yield from self._weight_only_problems(node, form)

    def _float_problems(self, node: Node) -> Iterator[str]:
        weight, _ = self._wiring.source(node.operands[1])
        flags = [each.value for each in node.operands[2:4]]
        if weight.kind != "parameter" or weight.type is None or flags != [False, True]:
            yield "the second operand must be a weight [out, in], with transpose_b"
        elif node.results != (TensorType(TYPES[self._dtype], (-1, weight.type.shape[0])),):
            yield f"the result is {node.results[0]}; it does not fit the weight {weight.type}"

    def _dynamic_problems(self, node: Node, form: LinearForm) -> Iterator[str]:
        """Yields the errors of a QuantBatchMatmul whose activations are quantised for each token.

        Its operands are x1, x2, scale, offset, bias, pertoken_scale, transpose_x1, transpose_x2, dtype.
        """
        operands = self._wiring.operands(node)
        integers, index = self._wiring.source(operands[0])
        scales, scales_index = self._wiring.source(operands[5])
        quantised = self._wiring.node_of(operands[0])
        if quantised is None or quantised.primitive != "DynamicQuantExt" or (index or 0) != 0:
            yield "x1 does not come from DynamicQuantExt"
        elif scales.name != integers.name or scales_index != 1:
            yield "the scales of the tokens are not those of the DynamicQuantExt that x1 comes from"
        elif self._wiring.operands(quantised)[1].value is not None:
            yield "smooth_scales are given; they must be None, because the weights were quantised without them"
        if [each.value for each in operands[6:8]] != [False, True]:
            yield "x2 must be a weight [out, in], with transpose_x2"
        yield from self._none_problems({"offset": operands[3], "bias": operands[4]})
        yield from self._parameter_problems(node, form, {"weight": operands[1], "scale": operands[2]})

    def _static_problems(self, node: Node, form: LinearForm) -> Iterator[str]:
        """Yields the errors of a QuantBatchMatmul with static inputs, and of the QuantV2 that quantises these inputs.

        The operands of QuantV2 are x, scale, offset, sqrt_mode, rounding_mode, dst_type.
        """
        operands = self._wiring.operands(node)
        quantised = self._wiring.node_of(operands[0])
        if quantised is None or quantised.primitive != "QuantV2":
            yield "x1 does not come from QuantV2"
            return
        if [each.value for each in operands[6:8]] != [False, True]:
            yield "x2 must be a weight [out, in], with transpose_x2"
        yield from self._none_problems({"offset": operands[3], "pertoken_scale": operands[5]})
        inputs = self._wiring.operands(quantised)
        given = {"weight": operands[1], "scale": operands[2], "sum_offset": operands[4]}
        given |= {"input_scale": inputs[1], "input_offset": inputs[2]}
        yield from self._parameter_problems(node, form, given)

    def _weight_only_problems(self, node: Node, form: LinearForm) -> Iterator[str]:
        """Yields the errors of a WeightQuantBatchMatmul.

        Its operands are x, weight, scale, offset, quant_scale, quant_offset, bias, transpose_x, transpose_weight,
        group_size.
        """
        operands = self._wiring.operands(node)
        transposed = is_transposed(form)
        if [each.value for each in operands[7:9]] != [False, transposed]:
            shape = "[out, in] with" if transposed else "[in, out] without"
            yield f"the weight must be {shape} transpose_weight"
        if operands[9].value != form.group:
            yield f"antiquant_group_size is {operands[9].value}; it must be {form.group}, the group size of the weight"
        absent = {"quant_scale": operands[4], "quant_offset": operands[5], "bias": operands[6]}
        given = {"weight": operands[1], "scale": operands[2]}
        if form.has_offsets:
            given["offset"] = operands[3]
        else:
            absent["offset"] = operands[3]
        yield from self._none_problems(absent)
        yield from self._parameter_problems(node, form, given)

    def _none_problems(self, absent: dict[str, Operand]) -> Iterator[str]:
        for name, operand in absent.items():
            if operand.kind != "constant" or operand.value is not None:
                yield f"{name} is given; it must be None"

    def _parameter_problems(self, node: Node, form: LinearForm, given: dict[str, Operand]) -> Iterator[str]:
        """Yields errors unless all parameters belong to the same layer, with the shapes and types that ``form``
        demands.
        """
        columns = node.results[0].shape[-1]
        x = self._wiring.operands(node)[0]
        depth = self._width(x)
        wanted = linear_parameters(form, depth, columns, self._dtype)
        stems = set()
        for name, operand in given.items():
            source, _ = self._wiring.source(operand)
            shape, dtype = wanted[name]
            if source.kind != "parameter" or source.type != TensorType(TYPES[dtype], shape):
                yield f"{name} is {source.type or source.kind}; it must be {TensorType(TYPES[dtype], shape)}"
            elif not source.name.endswith(f".{name}"):
                yield f"{name} is the parameter {source.name}, whose name does not end with .{name}"
            stems.add(source.name.rpartition(".")[0])
        if len(stems) > 1:
            yield f"the weight and its scales belong to different linear layers: {', '.join(sorted(stems))}"
        if node.results != (TensorType(TYPES[self._dtype], (-1, columns)),):
            yield f"the result is {node.results[0]}; it must have the type {TYPES[self._dtype]}"

    def _width(self, operand: Operand) -> int:
        source, index = self._wiring.source(operand)
        node = self._wiring.node_of(source)
        assert node is not None, "x is the result of a node"
        width: int = node.results[index or 0].shape[-1]
        return width
