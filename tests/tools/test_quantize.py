"""Tests tools/quantize.py: its output, its GPTQ and its errors.

Both this project and another library read the output.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent.models.registry import find_model
from agent.weights import WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.quantized import Scheme
from agent.weights.storage import Array, from_float32, to_float32
from agent.weights.tensor_files import TensorFiles
from llm_serving.model.quantization import Quantization, checkpoint_quantization
from llm_serving.model.shape import ModelShape
from performance.models.folders import tensor_shapes, write_model
from performance.models.variants import FAMILY_VARIANTS, VARIANTS
from support.golden_files import golden_of
from tools.quantization.folder_writer import FolderWriter
from tools.quantization.gptq import DAMPING, gptq
from tools.quantization.main import main
from tools.quantization.numpy_llama import NumpyLlama
from tools.quantization.rounding import Settings, fit, round_to_nearest

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
CASES: dict[str, tuple[list[str], Settings, Quantization]] = {
    "int8": (["--format", "int8"], Settings(8, 0, False, ""), Quantization("int-quantized", 8, 0)),
    "int4": (
        ["--format", "int4", "--group", "32"],
        Settings(4, 32, False, ""),
        Quantization("pack-quantized", 4, 32),
    ),
    "int4 asymmetric": (
        ["--format", "int4", "--group", "32", "--asymmetric"],
        Settings(4, 32, True, ""),
        Quantization("pack-quantized", 4, 32),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a float32 model in three shards, and a bfloat16 model with tied weights in one file."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("mha", "gqa_tied"):
        write_model(VARIANTS[name], folder / name)
    return folder


def specs_of(name: str) -> list[WeightSpec]:
    shapes = tensor_shapes(VARIANTS[name].config)
    return [WeightSpec(each, (WeightPart(each, shape),)) for each, shape in shapes.items()]


def read(folder: Path, name: str) -> dict[str, Array]:
    """Returns every tensor of a folder as float32. Quantised tensors are multiplied by their scales."""
    specs = specs_of(name)
    source = open_weights(folder, specs, seed=None)
    try:
        return load_weights(specs, source, "float32", lambda done, of: None)
    finally:
        source.close()


def nearest(weight: np.ndarray, settings: Settings, dtype: str) -> np.ndarray:
    """Returns the quantised weight by the definition: the nearest integers times the scale of their group.

    Each scale is rounded to the type of the file.
    """
    out = np.empty_like(weight)
    group = settings.group or weight.shape[1]
    for begin in range(0, weight.shape[1], group):
        part = weight[:, begin : begin + group]
        low, high = (
            np.minimum(part.min(axis=1, keepdims=True), np.float32(0)),
            np.maximum(part.max(axis=1, keepdims=True), np.float32(0)),
        )
        steps = np.float32(15 if settings.asymmetric else 2 ** (settings.bits - 1) - 1)
        scale = (high - low) / steps if settings.asymmetric else np.abs(part).max(axis=1, keepdims=True) / steps
        scale = to_float32(from_float32(scale, dtype), dtype)
        zero = np.clip(np.rint(-low / scale), 0, 15) if settings.asymmetric else np.float32(0)
        lowest, highest = (0, 15) if settings.asymmetric else (-steps, steps)
        out[:, begin : begin + group] = (np.clip(np.rint(part / scale) + zero, lowest, highest) - zero) * scale
    return out


@pytest.mark.parametrize("model", ["mha", "gqa_tied"])
@pytest.mark.parametrize("case", CASES)
def test_every_weight_is_the_nearest_integer(models: Path, tmp_path: Path, model: str, case: str) -> None:
    arguments, settings, quantization = CASES[case]
    assert main([str(models / model), str(tmp_path / "out"), *arguments]) == 0
    assert checkpoint_quantization(tmp_path / "out") == quantization
    before, after = read(models / model, model), read(tmp_path / "out", model)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        is_linear = name.endswith(tuple(f"{each}_proj.weight" for each in PROJECTIONS))
        expected = nearest(weight, settings, VARIANTS[model].dtype) if is_linear else weight
        np.testing.assert_array_equal(after[name], expected, err_msg=name)


def test_the_folder_is_complete_and_another_library_reads_it(models: Path, tmp_path: Path) -> None:
    (models / "mha" / "generation_config.json").write_text("{}")
    assert main([str(models / "mha"), str(tmp_path / "out"), "--format", "int4", "--group", "32"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 128
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    stem = "model.layers.0.mlp.down_proj"
    assert tensors[f"{stem}.weight_packed"].shape == (128, 352 // 8)
    assert tensors[f"{stem}.weight_packed"].dtype == np.int32
    assert tensors[f"{stem}.weight_shape"].tolist() == [128, 352]
    assert f"{stem}.weight" not in tensors


def test_a_large_folder_is_written_in_shards(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.arange(100 * i, 100 * i + 100, dtype=np.float32) for i in range(5)}
    writer = FolderWriter(tmp_path, max_shard_bytes=900)
    for name, array in tensors.items():
        writer.write(name, array)
    writer.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    files = TensorFiles(tmp_path)
    for name, array in tensors.items():
        np.testing.assert_array_equal(files.read(name)[0], array)
    files.close()


@pytest.mark.parametrize("golden", ["mha", "gqa_tied"])
def test_the_forward_pass_matches_transformers(models: Path, golden: str) -> None:
    shape, weights = ModelShape.from_hf_folder(models / golden), read(models / golden, golden)
    case = golden_of(golden)["cases"][1]
    tokens = np.array([case["prompt"]], np.int32)
    model, hidden = NumpyLlama(shape, tokens.shape[1]), weights["model.embed_tokens.weight"][tokens]
    for index in range(shape.num_layers):
        layer = {
            name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): array
            for name, array in weights.items()
        }
        hidden = model.layer(hidden, layer, lambda name, x, w=layer: x @ w[name].T, lambda names, x: None)
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = model.logits(hidden[0, -1], weights["model.norm.weight"], output)
    expected = np.frombuffer(base64.b64decode(case["logits"]["0"]), "<f4")
    np.testing.assert_allclose(logits, expected, atol=2e-3)


def correlated(rng: np.random.Generator, samples: int, depth: int) -> np.ndarray:
    mixing = rng.standard_normal((depth, depth)) * (rng.random(depth) ** 3 + 0.05)
    return (rng.standard_normal((samples, depth)) @ mixing).astype(np.float32)


def gptq_by_definition(weight: np.ndarray, hessian: np.ndarray, settings: Settings, scales: np.ndarray) -> np.ndarray:
    """Quantises one column after another by optimal brain quantisation. Returns the dequantised values.

    For each column, the Hessian matrix of the remaining columns is inverted again.
    """
    work, depth = weight.astype(np.float64), weight.shape[1]
    damped = hessian + np.eye(depth) * DAMPING * hessian.diagonal().mean()
    left = list(np.argsort(-hessian.diagonal(), kind="stable"))
    out = np.empty(weight.shape)
    while left:
        column, rest = left[0], left[1:]
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        scale = scales[:, column // (settings.group or depth)]
        bound = settings.middle - 1
        out[:, column] = np.clip(np.rint(work[:, column] / scale), -bound, bound) * scale
        error = (work[:, column] - out[:, column]) / inverse[0, 0]
        work[:, rest] -= np.outer(error, inverse[0, 1:])
        left = rest
    return out


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 0), (8, 0)])
def test_gptq_matches_its_definition(bits: int, group: int) -> None:
    rng, settings = np.random.default_rng(0), Settings(bits, group, False, "float32")
    weight, inputs = rng.standard_normal((24, 96)).astype(np.float32), correlated(rng, 600, 96)
    hessian = inputs.astype(np.float64).T @ inputs
    result = gptq(weight, hessian, settings)
    expected = gptq_by_definition(weight, hessian, settings, result.scales)
    same = np.abs(result.values() - expected) < 1e-4
    # Where a value lies between two integers, rounding may go either way and change later columns.
    assert same.mean() > 0.97


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_preserves_outputs_better_than_rounding(bits: int, asymmetric: bool) -> None:
    if bits == 8 and asymmetric:
        return
    rng, settings = np.random.default_rng(1), Settings(bits, 32 if bits == 4 else 0, asymmetric, "bfloat16")
    weight, inputs = rng.standard_normal((64, 128)).astype(np.float32), correlated(rng, 1000, 128)
    hessian = inputs.astype(np.float64).T @ inputs
    errors = {}
    for name, result in (("gptq", gptq(weight, hessian, settings)), ("rtn", round_to_nearest(weight, settings))):
        errors[name] = float(np.square(inputs @ (result.values() - weight).T).sum())
    assert errors["gptq"] < 0.6 * errors["rtn"]


def test_an_input_that_is_always_zero_is_supported() -> None:
    rng, settings = np.random.default_rng(2), Settings(4, 32, False, "float32")
    weight, inputs = rng.standard_normal((8, 64)).astype(np.float32), correlated(rng, 200, 64)
    inputs[:, 5] = 0
    result = gptq(weight, inputs.astype(np.float64).T @ inputs, settings)
    assert np.isfinite(result.values()).all()
    assert (result.values()[:, 5] == 0).all()


def test_a_group_of_zeros_stays_zero() -> None:
    for asymmetric in (False, True):
        settings = Settings(4, 32, asymmetric, "float16")
        scales, zeros = fit(np.zeros((1, 2, 32), np.float32), settings)
        assert (scales > 0).all()
        assert np.isfinite(zeros).all()
        assert (round_to_nearest(np.zeros((2, 64), np.float32), settings).values() == 0).all()


def test_gptq_from_the_command_line(models: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(f"t{i}" for i in rng.integers(3, 1000, 80))}) for _ in range(20)]
    texts.write_text("\n".join(lines) + "\n")
    arguments = ["--format", "int4", "--group", "32", "--sequences", "16", "--length", "64"]
    calibrated = [*arguments, "--method", "gptq", "--calibration", str(texts)]
    assert main([str(models / "mha"), str(tmp_path / "gptq"), *calibrated]) == 0
    assert main([str(models / "mha"), str(tmp_path / "rtn"), *arguments]) == 0
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("gptq", "rtn")}
    assert sizes["gptq"] == sizes["rtn"]
    assert checkpoint_quantization(tmp_path / "gptq") == Quantization("pack-quantized", 4, 32)
    changed, plain = read(tmp_path / "gptq", "mha"), read(tmp_path / "rtn", "mha")
    name = "model.layers.1.mlp.down_proj.weight"
    assert not np.array_equal(changed[name], plain[name])
    assert np.abs(changed[name] - plain[name]).mean() < np.abs(plain[name]).mean()


def refusals(models: Path, tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    short, broken, empty = tmp_path / "short.jsonl", tmp_path / "broken.jsonl", tmp_path / "empty.jsonl"
    short.write_text('{"text": "t5 t6"}\n')
    broken.write_text('{"text": "t5"}\n{"text"\n')
    empty.write_text('{"prompt": "t5"}\n')
    mha, out = str(models / "mha"), str(tmp_path / "out")
    gptq_of = ["--format", "int4", "--group", "32", "--method", "gptq", "--calibration"]
    return {
        "no model": ([str(tmp_path / "none"), out, "--format", "int8"], "none: no such folder"),
        "group": (
            [mha, out, "--format", "int4", "--group", "64"],
            "down_proj.weight has shape [128, 352], whose inputs",
        ),
        "there": ([mha, str(tmp_path), "--format", "int8"], "already exists; remove it or name another folder"),
        "short": ([mha, out, *gptq_of, str(short)], "tokens, too few to calibrate, at least 256 are needed"),
        "broken": ([mha, out, *gptq_of, str(broken)], "broken.jsonl:2: not valid JSON"),
        "no text": ([mha, out, *gptq_of, str(empty)], 'empty.jsonl:1: there is no "text" in'),
        "no file": ([mha, out, *gptq_of, str(tmp_path / "x")], "cannot be read"),
    }


def test_errors_name_the_cause_and_leave_no_folder(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (arguments, expected) in refusals(models, tmp_path).items():
        assert main(arguments) == 1, name
        assert expected in capsys.readouterr().err, name
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [], name


@pytest.mark.parametrize(
    ("model", "block", "down"), [("qwen3_moe", "mlp", "down_proj"), ("mixtral", "block_sparse_moe", "w2")]
)
def test_another_family_is_rounded_but_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, block: str, down: str
) -> None:
    write_model(FAMILY_VARIANTS[model], tmp_path / "moe")
    out, texts = tmp_path / "out", tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": " ".join(f"t{i % 400}" for i in range(600))}) + "\n")
    calibrated = ["--format", "int8", "--method", "gptq", "--calibration", str(texts), "--sequences", "1"]
    assert main([str(tmp_path / "moe"), str(out), *calibrated]) == 1
    architecture = FAMILY_VARIANTS[model].config["architectures"][0]
    assert f"GPTQ supports only plain Llamas, this is {architecture}" in capsys.readouterr().err
    assert not out.exists()
    assert main([str(tmp_path / "moe"), str(out), "--format", "int8"]) == 0
    specs = find_model(architecture).weight_specs(ModelShape.from_hf_folder(out))
    source = open_weights(out, specs, seed=None)
    schemes = {part.name: source.scheme(part) for spec in specs for part in spec.parts}
    source.close()
    assert schemes[f"model.layers.0.{block}.experts.5.{down}.weight"] == Scheme("int8", 0)
    assert schemes[f"model.layers.0.{block}.gate.weight"] is None


def test_a_quantised_folder_is_not_quantised_again(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once: list[Any] = [str(tmp_path / "once"), "--format", "int8"]
    assert main([str(models / "mha"), *once]) == 0
    assert main([str(tmp_path / "once"), str(tmp_path / "twice"), "--format", "int4"]) == 1
    assert "once: is quantised already" in capsys.readouterr().err
