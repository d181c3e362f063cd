"""Tests the layouts and values of the weights that native primitives take, made from floats or from stored integers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.weights import LinearForm, LinearForms, Packing, WeightPart, WeightSpec, linear_forms, load_weights
from agent.weights.layout import WeightKind
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.seeded import SeededWeights
from agent.weights.storage import Array, to_float32
from llm_serving.errors import CheckpointError, ConfigError

DEPTH, COLUMNS, VOCABULARY = 128, 6, 70_000
INT4 = Packing("int4")
OTHER_GROUPS = "another model_config.weight_group (32, 64 or 128), or int8"


def spec(name: str, columns: int, depth: int, kind: WeightKind = "linear") -> WeightSpec:
    return WeightSpec(f"{name}.weight", (WeightPart(f"theirs.{name}.weight", (columns, depth)),), kind)


def experts(columns: int, depth: int, count: int = 2, layer: int = 0) -> WeightSpec:
    """Returns the specification of the down projections of all experts of a layer."""
    names = [f"theirs.layers.{layer}.experts.{index}.down_proj.weight" for index in range(count)]
    parts = tuple(WeightPart(name, (columns, depth)) for name in names)
    return WeightSpec(f"layers.{layer}.mlp.down.weight", parts, "linear", experts=count)


ROUTER = WeightSpec("layers.0.mlp.router.weight", (WeightPart("theirs.gate.weight", (3, 128)),), "linear", float32=True)
LAYER = spec("layers.0.attention.qkv", COLUMNS, DEPTH)
OUTPUT = spec("lm_head", VOCABULARY, DEPTH)


class Stored(SeededWeights):
    """A source of weights with some tensors stored as integers."""

    def __init__(self, tensors: dict[str, QuantizedTensor]) -> None:
        super().__init__(0)
        self._tensors = tensors

    def scheme(self, part: WeightPart) -> Scheme | None:
        return self._tensors[part.name].scheme if part.name in self._tensors else None

    def read_quantised(self, part: WeightPart) -> QuantizedTensor:
        return self._tensors[part.name]


def int4_tensor(*, group: int = 32, zeros: bool = True) -> QuantizedTensor:
    rng = np.random.default_rng(1)
    shape = (COLUMNS, DEPTH // group)
    return QuantizedTensor(
        Scheme("int4", group),
        rng.integers(0, 16, (COLUMNS, DEPTH)).astype(np.uint8),
        rng.uniform(0.01, 0.1, shape).astype(np.float16).astype(np.float32),
        rng.integers(0, 16, shape).astype(np.uint8) if zeros else None,
    )


def test_each_format_has_its_form() -> None:
    source, specs = SeededWeights(0), [LAYER, OUTPUT]
    assert linear_forms(specs, source, Packing("auto")) == LinearForms()
    both = LinearForm("int8")
    assert linear_forms(specs, source, Packing("int8")) == LinearForms(both, both)
    assert linear_forms(specs, source, Packing("int8_weight_only")) == LinearForms(LinearForm("int8_weight_only"))
    for name in ("int4", "int4_weight_only"):
        assert linear_forms(specs, source, Packing(name, 64)) == LinearForms(LinearForm("int4_weight_only", 64))
    odd = [LAYER, spec("lm_head", 419, DEPTH)]
    assert linear_forms(odd, source, Packing("int4", 64)) == LinearForms(LinearForm("int4_weight_only", 64))
    tied = [LAYER, replace(OUTPUT, packed_only=True)]
    assert linear_forms(tied, source, Packing("int8")) == LinearForms(both)


def test_stored_int4_has_offsets() -> None:
    tensor = int4_tensor()
    form = LinearForm("int4_weight_only", 32, has_offsets=True, stored=tensor.scheme)
    stored = Stored({"theirs.layers.0.attention.qkv.weight": tensor})
    for name in ("int4", "int4_weight_only"):
        assert linear_forms([LAYER], stored, Packing(name)) == LinearForms(form)


@pytest.mark.parametrize(
    ("specs", "packing", "problem", "remedy"),
    [
        ([spec("layers.0.a", 4, 32)], Packing("int4", 32), "groups of 32 of its 32 inputs", OTHER_GROUPS),
        ([spec("layers.0.a", 5, 128)], Packing("int4", 32), "5 outputs; 2 int4 values share a byte", "int8 or auto"),
        (
            [spec("layers.0.a", 65_536, 128)],
            Packing("int8_weight_only"),
            "is 65536 x 128; WeightQuantBatchMatmul takes at most 65535",
            "int8 or auto",
        ),
        (
            [experts(4, 80)],
            Packing("int4", 32),
            "groups of 32 of an expert's 80 inputs; GroupedMatmulV4 takes multiples of 32",
            OTHER_GROUPS,
        ),
        ([experts(4, 64)], Packing("int4", 16), "groups of 16 of an expert's 64 inputs", OTHER_GROUPS),
        (
            [experts(5, 64)],
            Packing("int4", 32),
            "an expert of layers.0.mlp.down.weight has 5 outputs; 2 int4 values share a byte",
            "int8 or auto",
        ),
        ([experts(65_536, 64)], Packing("int8"), "is 65536 x 64; GroupedMatmulV4 takes at most 65535", "auto"),
    ],
)
def test_weights_that_the_primitives_do_not_support_are_refused(
    specs: list[WeightSpec], packing: Packing, problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        linear_forms(specs, SeededWeights(0), packing)
    assert problem in str(refused.value)
    assert str(refused.value).endswith(f"; use {remedy}")


@pytest.mark.parametrize(
    ("refused_spec", "group", "problem"),
    [
        (spec("layers.0.a", COLUMNS, DEPTH), 16, "groups of 16 of its 128 inputs"),
        (spec("layers.0.a", COLUMNS - 1, DEPTH), 32, "5 outputs; 2 int4 values share a byte"),
        (spec("layers.0.a", 65_536, DEPTH), 32, "WeightQuantBatchMatmul takes at most 65535"),
        (experts(COLUMNS, DEPTH), 16, "groups of 16 of an expert's 128 inputs"),
        (experts(COLUMNS - 1, DEPTH), 32, "has 5 outputs; 2 int4 values share a byte"),
    ],
)
def test_stored_integers_that_the_primitives_do_not_support_can_only_be_dequantised(
    refused_spec: WeightSpec, group: int, problem: str
) -> None:
    stored = Stored(dict.fromkeys((part.name for part in refused_spec.parts), int4_tensor(group=group)))
    with pytest.raises(ConfigError) as refused:
        linear_forms([refused_spec], stored, INT4)
    assert problem in str(refused.value)
    assert str(refused.value).endswith("; use auto, which dequantises")


def test_a_format_that_contradicts_the_stored_integers_is_refused() -> None:
    names = [f"theirs.layers.{i}.a.weight" for i in range(2)]
    specs, tensor = [spec(f"layers.{i}.a", COLUMNS, DEPTH) for i in range(2)], int4_tensor()
    with pytest.raises(ConfigError, match="is stored as int4; use int4 or auto"):
        linear_forms(specs, Stored(dict.fromkeys(names, tensor)), Packing("int8"))
    with pytest.raises(ConfigError, match=r"layers.1.a.weight is stored in another form than earlier layers"):
        linear_forms(specs, Stored({names[0]: tensor}), Packing("int4"))
    grouped = replace(tensor, scheme=Scheme("int8", 32))
    with pytest.raises(ConfigError, match="QuantBatchMatmul has one scale for each output"):
        linear_forms(specs, Stored(dict.fromkeys(names, grouped)), Packing("int8"))


def int4_of(weight: Array) -> np.ndarray:
    """Unpacks int4 weights: bytes [inputs, outputs / 2] become integers [outputs, inputs] from -8 to 7."""
    low, high = (weight << 4).astype(np.int8) >> 4, weight >> 4
    return np.stack([low, high], -1).reshape(len(weight), -1).T.astype(int)


@pytest.mark.parametrize("zeros", [True, False])
def test_stored_int4_keeps_its_values(zeros: bool) -> None:
    tensor = int4_tensor(zeros=zeros)
    source = Stored({"theirs.layers.0.attention.qkv.weight": tensor})
    forms = linear_forms([LAYER], source, Packing("int4"))
    weights = load_weights([LAYER], source, "float16", lambda *_: None, forms=forms)
    stem = "layers.0.attention.qkv"
    assert {name: array.shape for name, array in weights.items()} == {
        f"{stem}.weight": (DEPTH, COLUMNS // 2), f"{stem}.scale": (4, COLUMNS), f"{stem}.offset": (4, COLUMNS),
    }  # fmt: skip
    spread = [np.repeat(weights[f"{stem}.{name}"].T.astype(np.float32), 32, 1) for name in ("scale", "offset")]
    value = (int4_of(weights[f"{stem}.weight"]) + spread[1]) * spread[0]
    np.testing.assert_array_equal(value, tensor.dequantise_rows(0, COLUMNS))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("fmt", "step"), [("int8", 127), ("int8_weight_only", 127), ("int4", 7)])
def test_floats_are_rounded_to_the_nearest_step(fmt: str, step: int, dtype: str) -> None:
    source, packing = SeededWeights(5, std=0.3), Packing(fmt, 32)
    forms = linear_forms([LAYER], source, packing)
    weights = load_weights([LAYER], source, dtype, lambda *_: None, forms=forms)
    plain = to_float32(load_weights([LAYER], source, dtype, lambda *_: None)["layers.0.attention.qkv.weight"], dtype)
    weight, scale = weights["layers.0.attention.qkv.weight"], weights["layers.0.attention.qkv.scale"]
    integers = int4_of(weight) if fmt == "int4" else weight.astype(int)
    scales = to_float32(scale, "float32" if fmt == "int8" else dtype)
    group = 32 if fmt == "int4" else DEPTH
    scales = scales.T if fmt == "int4" else scales.reshape(COLUMNS, 1)
    largest = np.abs(plain.reshape(COLUMNS, -1, group)).max(-1)
    np.testing.assert_allclose(scales, largest / step, rtol=1e-6 if fmt == "int8" else 2**-8)
    error = np.abs(integers * np.repeat(scales, group, 1) - plain)
    assert np.abs(integers).max() <= step
    # Each error is at most half a step, plus the rounding of the scale times the largest integer.
    assert (error <= np.repeat(scales, group, 1) * (0.5 + step * 2**-8 + 1e-5)).all()


def test_experts_and_layers_have_their_own_forms() -> None:
    source, specs = SeededWeights(0), [LAYER, ROUTER, experts(COLUMNS, DEPTH)]
    assert linear_forms(specs, source, Packing("auto")) == LinearForms()
    for packing, layers, of_experts in (
        (Packing("int8"), LinearForm("int8"), LinearForm("int8")),
        (Packing("int8_weight_only"), LinearForm("int8_weight_only"), LinearForm("int8_weight_only", 0, True)),
        (Packing("int4", 32), LinearForm("int4_weight_only", 32), LinearForm("int4_weight_only", 32, True)),
        (Packing("int4", 128), LinearForm("int4_weight_only", 64), LinearForm("int4_weight_only", 128, True)),
    ):
        if packing.group == 128:  # only experts accept a group of all their inputs; a layer refuses it
            assert linear_forms(specs[1:], source, packing) == LinearForms(experts=of_experts)
        else:
            assert linear_forms(specs, source, packing) == LinearForms(layers, experts=of_experts)


def test_experts_stored_in_different_forms_are_refused() -> None:
    specs, tensor = [experts(COLUMNS, DEPTH, layer=layer) for layer in range(2)], int4_tensor(zeros=False)
    stored = {part.name: tensor for part in specs[0].parts}
    with pytest.raises(ConfigError, match=r"layers.1.mlp.down.weight is stored in another form than earlier experts"):
        linear_forms(specs, Stored(stored), Packing("int4"))
    with pytest.raises(ConfigError, match=r"the parts of .* are stored in different formats"):
        linear_forms(specs, Stored(dict([*stored.items()][:1])), Packing("int4"))
    grouped = replace(tensor, scheme=Scheme("int8", 32))
    with pytest.raises(ConfigError, match="GroupedMatmulV4 has one scale for each output of int8 weights"):
        linear_forms(specs, Stored(dict.fromkeys(stored, grouped)), Packing("int8_weight_only"))


def test_stored_int4_experts_keep_their_values() -> None:
    """The loaded int4 weights of experts have the values of the folder.

    Their layout is [experts, inputs, outputs], with two outputs in a byte. Scales and offsets are [experts, groups,
    outputs]. All offsets are zero.
    """
    spec, tensors = experts(COLUMNS, DEPTH), [int4_tensor(zeros=False) for _ in range(2)]
    tensors[1] = replace(tensors[1], values=15 - tensors[1].values, scales=tensors[1].scales * 2)
    source = Stored(dict(zip((part.name for part in spec.parts), tensors, strict=True)))
    weights = load_weights([spec], source, "float16", lambda *_: None, forms=linear_forms([spec], source, INT4))
    assert {name.rpartition(".")[2]: array.shape for name, array in weights.items()} == {
        "weight": (2, DEPTH, COLUMNS // 2), "scale": (2, 4, COLUMNS), "offset": (2, 4, COLUMNS),
    }  # fmt: skip
    assert not weights["layers.0.mlp.down.offset"].any()
    for index, tensor in enumerate(tensors):
        scales = np.repeat(weights["layers.0.mlp.down.scale"][index].T.astype(np.float32), 32, 1)
        value = int4_of(weights["layers.0.mlp.down.weight"][index]) * scales
        np.testing.assert_array_equal(value, tensor.dequantise_rows(0, COLUMNS))


def test_zero_points_of_groups_are_refused_for_experts() -> None:
    spec, tensor = experts(COLUMNS, DEPTH, count=1), int4_tensor()
    source = Stored({spec.parts[0].name: tensor})
    forms = linear_forms([spec], source, INT4)
    with pytest.raises(CheckpointError, match="zero points; GroupedMatmulV4 supports them only for whole rows"):
        load_weights([spec], source, "float16", lambda *_: None, forms=forms)
    assert tensor.zeros is not None
    rows = replace(tensor, scheme=Scheme("int4", 0), scales=tensor.scales[:, :1], zeros=tensor.zeros[:, :1])
    source = Stored({spec.parts[0].name: rows})
    forms = linear_forms([spec], source, INT4)
    weights = load_weights([spec], source, "float16", lambda *_: None, forms=forms)
    stem = "layers.0.mlp.down"
    assert weights[f"{stem}.scale"].shape == weights[f"{stem}.offset"].shape == (1, COLUMNS)
    scale, offset = (weights[f"{stem}.{name}"][0].astype(np.float32)[:, None] for name in ("scale", "offset"))
    value = (int4_of(weights[f"{stem}.weight"][0]) + offset) * scale
    np.testing.assert_array_equal(value, rows.dequantise_rows(0, COLUMNS))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["int8", "int8_weight_only", "int4"])
def test_each_expert_is_rounded_like_a_single_layer(fmt: str, dtype: str) -> None:
    """Each expert gets the same integers and scales as a single layer with its weights.

    There is one exception: the scales of int8 experts are bfloat16 if the activations are bfloat16.
    """
    spec, source, packing = experts(COLUMNS, DEPTH, count=3), SeededWeights(5, std=0.3), Packing(fmt, 32)
    weights = load_weights([spec], source, dtype, lambda *_: None, forms=linear_forms([spec], source, packing))
    stem = "layers.0.mlp.down"
    for index in range(3):
        alone = replace(spec.expert(index), parameter="layers.0.a.weight")
        forms = linear_forms([alone], source, packing)
        single = load_weights([alone], source, dtype, lambda *_: None, forms=forms)
        weight, scale = weights[f"{stem}.weight"][index], weights[f"{stem}.scale"][index]
        if fmt == "int8" and dtype == "bfloat16":
            assert scale.dtype == np.uint16
            exact, rounded = single["layers.0.a.scale"], to_float32(scale, dtype)
            np.testing.assert_allclose(rounded, exact, rtol=2**-8)
            assert (rounded != exact).any()
            values = load_weights([alone], source, dtype, lambda *_: None)["layers.0.a.weight"]
            wanted = np.clip(np.rint(to_float32(values, dtype) / rounded[:, None]), -127, 127)
            assert (
                np.abs(weight.T - wanted).max() <= 1
            )  # rounding may go either way if the quotient is halfway between two integers
            assert (wanted == weight.T).mean() > 0.99
        else:
            np.testing.assert_array_equal(weight if fmt == "int4" else weight.T, single["layers.0.a.weight"])
            np.testing.assert_array_equal(scale, single["layers.0.a.scale"])


def test_groups_that_are_not_consecutive_are_refused() -> None:
    tensor = replace(int4_tensor(), group_of_input=np.zeros(DEPTH, np.int32))
    source = Stored({"theirs.layers.0.attention.qkv.weight": tensor})
    with pytest.raises(CheckpointError, match="desc_act"):
        load_weights([LAYER], source, "float16", lambda *_: None, forms=linear_forms([LAYER], source, Packing("int4")))
