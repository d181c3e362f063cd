"""Checks the primitives of a mixture of experts in a graph.

The rules cover the choice of experts, the sorting of rows by expert, the grouped matrix products, and the weighted sum
of the experts' results. Weights are floats, or integers in the layouts of ``agent.weights.forms``. docs/ascend.md names
the sources of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from agent.backends.native.experts import group_bounds
from agent.backends.native.linear import expert_bias_type, expert_parameters
from agent.weights.forms import LinearForm
from llm_serving.model.families import Experts
from llm_serving.model.shape import ModelShape
from tools.ascend_graph.listing import Wiring
from tools.ascend_graph.mind_ir import Node, Operand, TensorType
from tools.ascend_graph.products import TYPES

EXPERT_PRIMITIVES = frozenset(
    {
        "FusedAddTopKDiv",
        "GroupedMatmulV4",
        "InnerMoeTokenUnpermute",
        "Minimum",
        "MoeGatingTopKSoftmax",
        "MoeInitRoutingV2",
        "NanToNum",
        "RealDiv",
        "ReduceSum",
        "Softmax",
        "TopkExt",
    }
)
"""Primitives that only a mixture of experts uses. MindSpore compiles MoeTokenUnpermute to InnerMoeTokenUnpermute."""
ROUTER = "mlp.router.weight"
_OPERANDS = (
    "x", "weight", "bias", "scale", "offset", "antiquant_scale", "antiquant_offset", "pre_token_scale", "group_list",
    "activation_input", "activation_quant_scale", "activation_quant_offset",
)  # fmt: skip
"""Names of the first operands of GroupedMatmulV4, in order. The settings (``_SETTINGS``) follow them."""
_SETTINGS = {"split_item": 3, "group_type": 0, "group_list_type": 1, "act_type": 0}
"""Required settings of every grouped product: one output, groups of rows given by their sizes, no activation."""
_ROUTING = {"active_num": 0, "expert_capacity": 0, "drop_pad_mode": 0, "expert_tokens_count_or_cumsum_flag": 2}
"""Required settings of the routing primitive: it drops and pads no row, and counts the rows of each expert."""

Found = tuple[str, str, int]
"""The origin of an operand as a tuple: primitive or other kind of value, name, and index of the result."""


class ExpertRules:
    """Finds errors in the primitives of a layer with experts."""

    def __init__(self, wiring: Wiring, form: LinearForm, shape: ModelShape, dtype: str) -> None:
        """``shape`` has the sizes of the part of the model that the agent runs. ``dtype`` is the type of the
        activations, as in ``model_dtype``.
        """
        self._wiring, self._form, self._hidden, self._dtype = wiring, form, shape.hidden_size, dtype
        self._experts = shape.experts or Experts(0, 0, 0, normalised=False)
        self._layers = sum(shape.has_experts(layer) for layer in range(shape.num_layers))
        self.checks: dict[str, Callable[[Node], Iterator[str]]] = {
            "MoeGatingTopKSoftmax": self._choice_problems,
            "FusedAddTopKDiv": self._grouped_choice_problems,
            "TopkExt": self._limited_choice_problems,
            "MoeInitRoutingV2": self._order_problems,
            "GroupedMatmulV4": self._product_problems,
            "InnerMoeTokenUnpermute": self._return_problems,
        }

    def counts(self) -> dict[str, int]:
        """Returns how many calls of each primitive the expert layers add to the graph.

        The expert router's MatMul (``num_routers``) is not counted here. The DynamicQuantExt before each product with
        int8 activations (``num_quantised_inputs``) is not counted either.
        """
        layers = self._layers
        norms = layers if self._experts.normalised and self._router == "MoeGatingTopKSoftmax" else 0
        limited = self.num_group_choices
        chain = dict.fromkeys(("MoeGatingTopKSoftmax", "FusedAddTopKDiv"), 0)
        chain |= dict.fromkeys((self._router, "MoeInitRoutingV2", "InnerMoeTokenUnpermute"), layers)
        chain |= {"Softmax": limited, "TopkExt": 2 * limited, "ReduceSum": norms + limited}
        own = layers if self._is_divided else 0
        return chain | {"GroupedMatmulV4": 2 * layers, "RealDiv": norms, "NanToNum": own}

    @property
    def num_group_choices(self) -> int:
        """Number of ArgMaxWithValue nodes that find the best score in each group of experts."""
        return self._layers if self._router == "TopkExt" else 0

    @property
    def _router(self) -> str:
        """The primitive that chooses the experts of a token."""
        routing = self._experts.routing
        if routing is not None and routing.sigmoid:
            return "FusedAddTopKDiv"
        return "TopkExt" if routing is not None and routing.groups > 1 else "MoeGatingTopKSoftmax"

    @property
    def _is_divided(self) -> bool:
        """True if the agent has only some of the experts."""
        return self._experts.num_held is not None

    @property
    def num_shared(self) -> int:
        """Number of layers with shared experts."""
        return self._layers if self._experts.shared_size else 0

    @property
    def num_routers(self) -> int:
        return self._layers

    @property
    def num_quantised_inputs(self) -> int:
        return 2 * self._layers if self._form.quantises_activations else 0

    def is_router(self, node: Node) -> bool:
        return node.primitive == "MatMul" and self._wiring.source(node.operands[1])[0].name.endswith(ROUTER)

    def router_problems(self, node: Node) -> Iterator[str]:
        """Yields the errors of the expert router's MatMul, which must be in float32 for every type of weights."""
        weight, _ = self._wiring.source(node.operands[1])
        wanted = TensorType("f32", (self._experts.count, self._hidden))
        if weight.type != wanted or [each.value for each in node.operands[2:4]] != [False, True]:
            yield f"the expert router's weight is {weight.type}; it must be {wanted}, with transpose_b"
        if node.results != (TensorType("f32", (-1, self._experts.count)),):
            yield f"the result is {node.results[0]}; the expert router's logits must be float32"

    def _choice_problems(self, node: Node) -> Iterator[str]:
        x, finished, k = self._wiring.operands(node)
        source = self._wiring.node_of(x)
        if self._experts.biased:
            yield from self._router_bias_problems(node, source)
            source = None if source is None else self._wiring.node_of(source.operands[0])
        if source is None or not self.is_router(source):
            yield "the experts are not chosen by the expert router's logits"
        if finished.value is not None or k.value != self._experts.per_token:
            yield (
                f"k is {k.value} and finished is {finished.value or finished.kind}; k must be "
                f"{self._experts.per_token}, the experts of a token, and finished must be None"
            )

    def _router_bias_problems(self, node: Node, added: Node | None) -> Iterator[str]:
        name, wanted = f"layers.{node.layer}.mlp.router.bias", TensorType("f32", (self._experts.count,))
        bias = None if added is None or added.primitive != "Add" else self._wiring.source(added.operands[1])[0]
        if bias is None or bias.name != name or bias.type != wanted:
            yield f"the router's logits do not have {name} {wanted} added"

    def _grouped_choice_problems(self, node: Node) -> Iterator[str]:
        operands, routing = self._wiring.operands(node), self._experts.routing
        assert routing is not None, "this primitive is counted, so the model has this router"
        source = self._wiring.node_of(operands[0])
        if source is None or not self.is_router(source):
            yield "the experts are not chosen by the expert router's logits"
        correction, _ = self._wiring.source(operands[1])
        if correction.name != f"layers.{node.layer}.mlp.correction":
            yield f"add_num is {correction.name or correction.kind}, not the parameter correction of the layer"
        given = [each.value for each in operands[2:8]]
        wanted = [routing.groups, routing.chosen_groups, 2, self._experts.per_token, 0, self._experts.normalised]
        if given != wanted:
            yield f"group_num, group_topk, n, k, activate_type and is_norm are {given}; the model's are {wanted}"
        if abs(operands[8].value - routing.factor) > 1e-6:
            yield f"scale is {operands[8].value:g}; the model's is {routing.factor:g}"

    def _limited_choice_problems(self, node: Node) -> Iterator[str]:
        """Yields errors of a TopkExt, which chooses either groups of experts or the experts of a token."""
        x, *settings = self._wiring.operands(node)
        routing, source = self._experts.routing, self._wiring.node_of(x)
        assert routing is not None, "this primitive is counted, so the model has this router"
        if source is None:
            yield "the scores are not computed"
            return
        of_groups = source.primitive == "ArgMaxWithValue"
        wanted = [routing.chosen_groups if of_groups else self._experts.per_token, -1, True, True]
        given = [each.value for each in settings]
        if given != wanted:
            yield f"k, dim, largest and sorted are {given}; they must be {wanted}"
        yield from self._group_score_problems(x, source) if of_groups else self._bound_problems(source)

    def _group_score_problems(self, x: Operand, largest: Node) -> Iterator[str]:
        """Yields errors unless the score of a group is the best score of its experts."""
        routing = self._experts.routing
        assert routing is not None, "the model has groups"
        reshape = self._wiring.node_of(self._wiring.operands(largest)[0])
        grouped = TensorType("f32", (-1, routing.groups, self._experts.count // routing.groups))
        if self._wiring.source(x)[1] != 1 or reshape is None or reshape.results != (grouped,):
            yield f"a group's score must be the largest value of its experts' scores {grouped}"
        elif not self._are_scores(self._wiring.operands(reshape)[0]):
            yield "the groups are not ranked by the softmax of the expert router's logits"

    def _bound_problems(self, source: Node) -> Iterator[str]:
        """Yields errors unless experts are chosen by their scores, within the chosen groups."""
        routing = self._experts.routing
        assert routing is not None, "the model has groups"
        if source.primitive != "Minimum":
            yield f"the experts are chosen by a result of {source.primitive}, which does not bound their scores"
            return
        scores, bounds = self._wiring.operands(source)
        if not self._are_scores(scores):
            yield "the experts are not chosen by the softmax of the expert router's logits"
        total = self._wiring.node_of(bounds)
        gather = None if total is None else self._wiring.node_of(self._wiring.operands(total)[0])
        if total is None or total.primitive != "ReduceSum" or gather is None or gather.primitive != "Gather":
            yield "the bounds of the scores are not the sums of the rows of the chosen groups"
            return
        table, groups, _ = self._wiring.operands(gather)[:3]
        if not np.array_equal(table.value, group_bounds(self._experts.count, routing)):
            yield "the table of bounds does not belong to the model's groups"
        if self._origin(groups)[::2] != ("TopkExt", 1) or self._axis(total) != 1:
            yield "the bounds are not summed over the chosen groups"

    def _are_scores(self, operand: Operand) -> bool:
        """Returns True if ``operand`` is the softmax of the expert router's logits over all experts."""
        node = self._wiring.node_of(operand)
        if node is None or node.primitive != "Softmax":
            return False
        router = self._wiring.node_of(self._wiring.operands(node)[0])
        return router is not None and self.is_router(router) and self._axis(node) == -1

    def _axis(self, node: Node) -> Any:
        """Returns the axis of a node, which is its second operand. If the axis is a tuple of one number, returns the
        number.
        """
        axis = self._wiring.operands(node)[1].value
        return axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis

    def _order_problems(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        names = ("x", "expert_idx", "active_num", "expert_capacity", "expert_num", "drop_pad_mode",
                 "expert_tokens_count_or_cumsum_flag", "expert_tokens_before_capacity_flag")  # fmt: skip
        given = dict(zip(names, operands, strict=True))
        if self._origin(self._chosen(given["expert_idx"]))[::2] != (self._router, 1):
            yield f"expert_idx is not the choice of {self._router}"
        wanted = _ROUTING | {"expert_num": self._experts.count}
        for name, value in wanted.items():
            if given[name].value != value:
                yield f"{name} is {given[name].value}; it must be {value}"

    def _return_problems(self, node: Node) -> Iterator[str]:
        tokens, places, shares = self._wiring.operands(node)[:3]
        last = self._wiring.node_of(tokens)
        if self._is_divided and last is not None and last.primitive == "NanToNum":
            tokens = self._wiring.operands(last)[0]
        if self._origin(tokens)[0] != "GroupedMatmulV4":
            yield "the tokens do not come from GroupedMatmulV4"
        if self._origin(places)[::2] != ("MoeInitRoutingV2", 1):
            yield "sorted_indices do not come from MoeInitRoutingV2, which says where each row was moved"
        source = self._wiring.node_of(shares)
        wanted = TensorType(TYPES[self._dtype], (-1, self._experts.per_token))
        if source is None or source.results[0] != wanted:
            yield f"probs are {None if source is None else source.results[0]}; they must be {wanted}"
        elif self._router != "FusedAddTopKDiv":
            yield from self._share_problems(self._wiring.operands(source)[0])

    def _share_problems(self, shares: Operand) -> Iterator[str]:
        """Yields errors unless the weights of a token's experts are their scores, divided and scaled as the model does.

        ``shares`` are the weights in float32.
        """
        routing, node = self._experts.routing, self._wiring.node_of(shares)
        steps = ["Mul"] if self._is_divided else []
        steps += ["Mul"] if routing is not None and routing.factor != 1.0 else []
        steps += ["RealDiv"] if self._experts.normalised else []
        found, factor = [], None
        while node is not None and node.primitive in ("Mul", "RealDiv"):
            found.append(node.primitive)
            shares, other = self._wiring.operands(node)
            factor = other if node.primitive == "Mul" else factor
            node = self._wiring.node_of(shares)
        if found != steps or self._origin(shares)[::2] != (self._router, 0):
            yield f"the experts' weights are the scores after {found or 'nothing'}; it must be {steps or 'nothing'}"
        elif routing is not None and routing.factor != 1.0 and not _is_number(factor, routing.factor):
            yield f"the experts' weights are not multiplied by the model's factor {routing.factor:g}"

    def _product_problems(self, node: Node) -> Iterator[str]:
        operands = self._wiring.operands(node)
        given = dict(zip(_OPERANDS, operands, strict=False))
        settings = dict(zip(_SETTINGS, operands[len(_OPERANDS) :], strict=False))
        for name, value in _SETTINGS.items():
            if settings[name].value != value:
                yield f"{name} is {settings[name].value}; it must be {value}"
        yield from self._group_problems(given["group_list"])
        yield from self._rows_problems(given)
        present = {"x", "weight", "group_list", *self._scales().values()}
        present |= {"pre_token_scale"} if self._form.quantises_activations else set()
        present |= {"bias"} if self._experts.biased else set()
        for name, operand in given.items():
            is_given = operand.kind != "constant" or operand.value is not None
            if is_given != (name in present):
                found = "given; it must be None" if is_given else "missing"
                yield f"{name} is {found} for weights of the format {self._form.format}"
        yield from self._parameter_problems(node, given)

    def _scales(self) -> dict[str, str]:
        """Maps names of this project's scale parameters to the operands of GroupedMatmulV4 that take them."""
        if self._form.format == "float":
            return {}
        if self._form.quantises_activations:
            return {"scale": "scale"}
        return {"scale": "antiquant_scale", "offset": "antiquant_offset"}

    def _group_problems(self, groups: Operand) -> Iterator[str]:
        cast = self._wiring.node_of(groups)
        if cast is None or cast.primitive != "Cast" or cast.results[0].dtype != "i64":
            yield "group_list is not int64"
        elif self._origin(self._own_counts(cast.operands[0]))[::2] != ("MoeInitRoutingV2", 2):
            yield "group_list does not come from the counts of MoeInitRoutingV2"

    def _chosen(self, numbers: Operand) -> Operand:
        """Returns the operand with the chosen experts' ids in the whole model.

        ``numbers`` has the ids that the routing uses. If agents divide the experts, the graph converts the model's ids
        to the agent's own ids with a Gather.
        """
        gather = self._wiring.node_of(numbers)
        if gather is not None and self._is_divided and gather.primitive == "Gather":
            numbers = self._wiring.operands(gather)[1]
        cast = self._wiring.node_of(numbers)
        is_wide = self._router == "TopkExt" and cast is not None and cast.primitive == "Cast"  # TopkExt returns int64
        return self._wiring.operands(cast)[0] if cast is not None and is_wide else numbers

    def _own_counts(self, counts: Operand) -> Operand:
        """Returns the operand with the row counts of all experts.

        ``counts`` is the operand of a grouped product. If agents divide the experts, it is a Gather that selects the
        counts of the agent's own experts. This method then returns the operand of the Gather.
        """
        gather = self._wiring.node_of(counts)
        is_part = self._is_divided and gather is not None and gather.primitive == "Gather"
        return self._wiring.operands(gather)[0] if gather is not None and is_part else counts

    def _rows_problems(self, given: dict[str, Operand]) -> Iterator[str]:
        """Yields an error unless the product multiplies the right rows.

        The first product of a layer must take the rows sorted by expert, and the second must take the output of Swiglu.
        If rows are integers, their scales must come from the same DynamicQuantExt.
        """
        rows = given["x"]
        if self._form.quantises_activations:
            primitive, name, index = self._origin(rows)
            scales = self._origin(given["pre_token_scale"])
            if (primitive, index) != ("DynamicQuantExt", 0):
                yield "x does not come from DynamicQuantExt"
                return
            if scales != (primitive, name, 1):
                yield "the scales of the tokens are not those of the DynamicQuantExt that x comes from"
            node = self._wiring.node_of(rows)
            assert node is not None, "it was found above"
            rows = self._wiring.operands(node)[0]
        # ``SinkRules`` checks other activations than Swiglu.
        activation = "Swiglu" if self._experts.activation == "silu" else "Cast"
        wanted = (activation, 0) if self._place(given["weight"]) == "mlp.down" else ("MoeInitRoutingV2", 0)
        if self._origin(rows)[::2] != wanted:
            yield f"the rows do not come from {wanted[0]}"

    def _parameter_problems(self, node: Node, given: dict[str, Operand]) -> Iterator[str]:
        """Yields errors unless all parameters belong to the node's layer, with the shapes and types of the weight's
        form.
        """
        place, inner = self._place(given["weight"]), self._experts.intermediate_size
        depth, columns = (inner, self._hidden) if place == "mlp.down" else (self._hidden, 2 * inner)
        wanted = expert_parameters(self._form, self._experts.held, depth, columns, self._dtype)
        stem = f"layers.{node.layer}.{place}"
        names = {"weight": "weight"} | self._scales()
        if self._experts.biased:
            names |= {"bias": "bias"}
            wanted |= {"bias": ((self._experts.held, columns), expert_bias_type(self._dtype))}
        for name, operand in names.items():
            source, _ = self._wiring.source(given[operand])
            shape, dtype = wanted[name]
            if source.kind != "parameter" or source.type != TensorType(TYPES[dtype], shape):
                yield f"{operand} is {source.type or source.kind}; it must be {TensorType(TYPES[dtype], shape)}"
            elif source.name != f"{stem}.{name}":
                yield f"{operand} is the parameter {source.name}, not {stem}.{name}"
        if node.results != (TensorType(TYPES[self._dtype], (-1, columns)),):
            yield f"the result is {node.results[0]}; it must be {TensorType(TYPES[self._dtype], (-1, columns))}"

    def _place(self, weight: Operand) -> str:
        """Returns which product the weight belongs to: ``mlp.gate_up`` or ``mlp.down``."""
        return "mlp.down" if self._wiring.source(weight)[0].name.endswith("mlp.down.weight") else "mlp.gate_up"

    def _origin(self, operand: Operand) -> Found:
        source, index = self._wiring.source(operand)
        node = self._wiring.node_of(source)
        return (source.kind if node is None else node.primitive, source.name, index or 0)


def _is_number(operand: Operand | None, number: float) -> bool:
    """Returns True if ``operand`` is a constant with the value ``number``."""
    value = None if operand is None or operand.kind != "constant" else operand.value
    return value is not None and np.size(value) == 1 and float(np.reshape(value, -1)[0]) == number
