"""Tests the registry of weight and KV cache formats.

The kernels agree with the registry. Every place that takes a format from outside refuses an unknown one.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import numpy as np
import pytest

from agent.kernels.library import load_library
from agent.kernels.packing import pack_weight, packed_weight_bytes, weight_blob
from agent.kernels.primitive_weights import KeptWeights, PrimitiveWeight
from agent.weights.packed import Packing
from agent.weights.quantized import Scheme, unpacked
from agent.weights.storage import STORAGE_DTYPES
from llm_serving.config import Config, load_config
from llm_serving.errors import CheckpointError, ConfigError, UnknownFormatError
from llm_serving.model.number_formats import (
    INTEGER_FORMATS,
    STORED_FORMATS,
    WEIGHT_FORMATS,
    formats_of_stored,
    kv_format,
    stored_format,
    weight_format,
)
from llm_serving.model.quantization import checkpoint_quantization
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import estimate_memory
from performance.bench.engine_rows import numbers_of
from performance.bench.kernel_main import build_parser
from performance.bench.op_tables_main import main as compare_op_tables
from performance.bench.roofline import kv_token_bytes, weight_bytes, weight_unit
from performance.simulation.work import ModelWork
from support.model_folders import write_model_folder
from support.small_configs import REPOSITORY
from tools.quality_gate import chosen_formats
from tools.quantization.main import parse_arguments
from tools.quantization.rounding import Settings

UNKNOWN = "int1"
NOT_KNOWN = f"format '{UNKNOWN}' is not known; there are float32"


@pytest.fixture
def config(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    return load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}"], ascend=False)


def with_format(config: Config, **formats: str) -> Config:
    """Returns the config with other formats, without a check that they exist."""
    return replace(config, model_config=replace(config.model_config, **formats))


def test_the_kernels_number_the_formats_as_the_registry_does():
    header = (REPOSITORY / "agent" / "kernels" / "ops" / "linear.h").read_text()
    [body] = re.findall(r"enum class WeightFormat : int32_t {(.*?)};", header, re.DOTALL)
    found = {name.lower(): int(code) for name, code in re.findall(r"k(\w+) = (\d+)", body)}
    assert found == {name.replace("_", ""): each.kernel_code for name, each in WEIGHT_FORMATS.items()}
    assert [each.kernel_code for each in WEIGHT_FORMATS.values()] == list(range(len(WEIGHT_FORMATS)))


def test_the_names_in_an_entry_lead_to_other_entries():
    for each in INTEGER_FORMATS:
        assert weight_format(each.stored_as) in STORED_FORMATS
        assert each.name in formats_of_stored(each.stored_as)
        assert each.native is None or weight_format(each.native).native == each.native
        assert each.storage in STORAGE_DTYPES
    assert len({each.bits for each in STORED_FORMATS}) == len(STORED_FORMATS)


@pytest.mark.parametrize("name", [UNKNOWN, "", "auto", "INT8"])
def test_a_name_is_found_exactly_or_not_at_all(name):
    for look_up in (weight_format, kv_format):
        with pytest.raises(UnknownFormatError, match=f"format '{name}' is not known"):
            look_up(name)
    with pytest.raises(UnknownFormatError, match="no weight format has integers of 1 bits"):
        stored_format(1)


@pytest.mark.parametrize("key", ["weight_format", "kv_format"])
def test_the_config_refuses_an_unknown_format(config, key):
    with pytest.raises(ConfigError, match=f"{key} = '{UNKNOWN}': unknown value"):
        load_config("llama_tiny_cpu.yaml", [f"model_config.{key}={UNKNOWN}"])
    with pytest.raises(ConfigError, match=f"{key} = '{UNKNOWN}': unknown value"):
        Config.from_json(with_format(config, **{key: UNKNOWN}).to_json())


@pytest.mark.parametrize("key", ["weight_format", "kv_format"])
def test_the_planner_refuses_an_unknown_format(config, key):
    with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
        estimate_memory(with_format(config, **{key: UNKNOWN}), Machine(1 << 40, "a test", num_cores=1))


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 1},
        {"quant_method": "awq", "bits": 8},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 1}}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        },
    ],
)
def test_a_checkpoint_of_other_integers_is_refused(tmp_path, quantization):
    folder = write_model_folder(tmp_path / "model", quantization_config=quantization)
    with pytest.raises(CheckpointError, match=r"bits = \d: is not supported in the format"):
        checkpoint_quantization(folder)


def test_the_loader_refuses_an_unknown_format():
    for given in ({"weight_format": UNKNOWN}, {"weight_format": "int8", "output_format": UNKNOWN}):
        with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
            Packing(**given)
    with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
        _ = Scheme(UNKNOWN, 32).weights
    with pytest.raises(CheckpointError, match="integers of 1 bits cannot be unpacked"):
        unpacked(np.zeros((1, 1), np.int32), 1)


def test_packing_refuses_an_unknown_format():
    values = np.zeros((64, 64), np.float32)
    with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
        packed_weight_bytes(UNKNOWN, 64, 64)
    with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
        pack_weight(UNKNOWN, values, weight_blob(1 << 20))
    with pytest.raises(ValueError, match=f"a weight of type '{UNKNOWN}' is not known"):
        KeptWeights().keep(PrimitiveWeight(values, UNKNOWN), release=False)


def test_the_kernels_refuse_an_unknown_format():
    function = load_library().llmk_packed_weight_bytes
    function.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 3, ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_int64
    sizes = {code: function(code, 64, 64, 0, 0, 0) for code in range(-2, len(WEIGHT_FORMATS) + 2)}
    assert [code for code, size in sizes.items() if size] == list(range(len(WEIGHT_FORMATS)))


def test_native_operators_refuse_an_unknown_format():
    from agent.weights.forms import LinearForm, scale_type

    with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
        scale_type(LinearForm(UNKNOWN), "float16", of_experts=False)
    fused_only = replace(weight_format("int8"), name=UNKNOWN, native=None)
    with pytest.raises(UnknownFormatError, match=r"has no native primitives; use float32, .*int8, .* or auto"):
        fused_only.on("native")


def test_the_quantiser_refuses_an_unknown_format(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["a", "b", "--format", UNKNOWN])
    assert f"invalid choice: '{UNKNOWN}'" in capsys.readouterr().err
    with pytest.raises(UnknownFormatError, match="no weight format has integers of 1 bits"):
        Settings(1, 32, asymmetric=False, scale_dtype="float32")


def test_benchmarks_and_simulator_refuse_an_unknown_format(config, capsys):
    for refuse in (
        lambda: weight_bytes(UNKNOWN, 64, 64, 32),
        lambda: weight_unit(UNKNOWN, "bfloat16"),
        lambda: kv_token_bytes(UNKNOWN, 2, 64),
        lambda: numbers_of(with_format(config, weight_format=UNKNOWN)),
        lambda: ModelWork.of(with_format(config, weight_format=UNKNOWN)),
    ):
        with pytest.raises(UnknownFormatError, match=NOT_KNOWN):
            refuse()
    with pytest.raises(ConfigError, match=f"--formats {UNKNOWN}: the formats are"):
        chosen_formats(UNKNOWN)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--formats", UNKNOWN])
    assert f"{UNKNOWN}: expected some of bfloat16, int8" in capsys.readouterr().err
    assert compare_op_tables(["--weights", UNKNOWN]) == 2
    assert NOT_KNOWN in capsys.readouterr().err
