"""Tests configs of quantised model folders: the detected format, and the settings that are accepted for it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from llm_serving.config import Config, load_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.quantization import stored_weight_format
from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.gguf_files import F16, F32, Q4_0, Q4_1, Q8_0, write_gguf
from support.model_folders import write_model_folder

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
}


def config_of(folder: Path, *overrides: str) -> Config:
    place = f"model_config.model_path={folder}"
    return load_config("llama_tiny_cpu.yaml", [place, *(f"model_config.{each}" for each in overrides)], ascend=False)


def gguf_header() -> bytes:
    """Returns a GGUF header whose metadata has entries of many types."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.0),
        text("general.file_type") + struct.pack("<II", 4, 2),
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


@pytest.mark.parametrize(
    ("quantization", "wanted", "weight_format"),
    [
        (GPTQ, "auto", "int4"),
        (GPTQ, "int4", "int4"),
        (GPTQ, "int4_weight_only", "int4_weight_only"),
        (W8A8, "auto", "int8"),
        (W8A8, "int8_weight_only", "int8_weight_only"),
        (GPTQ, "bf16", "bfloat16"),
    ],
)
def test_auto_takes_the_format_of_the_folder_and_a_setting_overrides_it(
    tmp_path: Path, quantization: object, wanted: str, weight_format: str
) -> None:
    folder = write_model_folder(tmp_path / "model", quantization_config=quantization)
    config = config_of(folder, f"weight_format={wanted}", "model_dtype=bfloat16")
    assert config.weight_format == weight_format
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("weights", "fused", "native"),
    [
        ("auto", False, False),
        ("int8", True, True),
        ("int8_weight_only", False, False),
        ("int4", True, False),
        ("int4_weight_only", False, False),
    ],
)
def test_formats_that_quantise_activations(tmp_path: Path, weights: str, fused: bool, native: bool) -> None:
    folder = write_model_folder(tmp_path / "model")
    for op_table, expected in (("fused", fused), ("native", native)):
        config = config_of(
            folder, f"op_table={op_table}", f"weight_format={weights}", "model_dtype=bfloat16", "weight_group=32"
        )
        assert config.quantises_activations == expected


@pytest.mark.parametrize(
    ("quantization", "wanted", "message"),
    [
        (
            GPTQ,
            "int8",
            "weight_format = 'int8': the model folder holds int4 weights; use auto, int4 or int4_weight_only",
        ),
        (W8A8, "int4", "weight_format = 'int4': the model folder holds int8 weights; use auto, int8 or"),
        (W8A8, "int4_weight_only", "the model folder holds int8 weights; use auto, int8 or"),
    ],
)
def test_integers_are_not_rounded_twice(tmp_path: Path, quantization: object, wanted: str, message: str) -> None:
    folder = write_model_folder(tmp_path / "model", quantization_config=quantization)
    with pytest.raises(ConfigError) as caught:
        config_of(folder, f"weight_format={wanted}")
    assert message in str(caught.value)


def parts_of_a_sum(folder: Path, *overrides: str) -> Config:
    given = [f"model_config.model_path={folder}", "model_config.model_dtype=bfloat16", *overrides]
    return load_config("llama_tiny_cpu.yaml", given, ascend=False)


@pytest.mark.parametrize("wanted", ["auto", "int8_weight_only"])
def test_sum_parts_refuse_stored_integers(tmp_path: Path, wanted: str) -> None:
    folder = write_model_folder(tmp_path / "model", quantization_config=W8A8)
    with pytest.raises(ConfigError, match="stored as int8; use weight_format bf16, or 1"):
        parts_of_a_sum(folder, "parallel_config.sum_parts=2", f"model_config.weight_format={wanted}")
    config = parts_of_a_sum(folder, "parallel_config.sum_parts=2", "model_config.weight_format=bf16")
    heads = config.shape.num_attention_heads
    assert [len(shard.query_heads) for shard in config.sum_shards] == [heads // 2, heads // 2]


def test_sum_parts_are_refused_for_native_operators_and_experts(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="op_table is native, whose sums are rounded for each agent"):
        parts_of_a_sum(folder, "parallel_config.sum_parts=2", "model_config.op_table=native")
    with pytest.raises(ConfigError, match=r"sum_parts = 64: "):
        parts_of_a_sum(folder, "parallel_config.sum_parts=64")
    write_model(FAMILY_VARIANTS["mixtral"], tmp_path / "experts")
    with pytest.raises(ConfigError, match="the model has experts, whose sums have no parts"):
        parts_of_a_sum(tmp_path / "experts", "parallel_config.sum_parts=2")


def test_an_unsupported_quantisation_scheme_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", quantization_config={"quant_method": "nf4"})
    with pytest.raises(CheckpointError, match=r"quantization_config\.quant_method = 'nf4': is not supported"):
        config_of(folder)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((Q4_0, Q4_0, Q8_0), "int4"),
        ((Q8_0, Q8_0, F32), "int8"),
        ((Q4_1, Q4_1, F16), "int8"),
        ((F16, F16, Q8_0), None),
        ((), None),
    ],
)
def test_the_most_common_type_of_a_gguf_file_gives_the_format(
    tmp_path: Path, kinds: tuple[int, ...], expected: str | None
) -> None:
    folder = write_model_folder(tmp_path / "model", files=("tokenizer.json",))
    sizes = {F32: 128, F16: 64, Q4_0: 18, Q4_1: 20, Q8_0: 34}
    tensors = {f"t{i}": (kind, (2, 32), bytes(2 * sizes[kind])) for i, kind in enumerate(kinds)}
    write_gguf(folder / "model.gguf", tensors, {"general.architecture": "llama"})
    assert stored_weight_format(folder) == expected
    assert config_of(folder).stored_weight_format == expected


def test_a_truncated_gguf_header_is_refused(tmp_path: Path) -> None:
    whole = gguf_header()
    for length in range(len(whole)):
        (tmp_path / "model.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf: not a GGUF file that can be read, or truncated"):
            stored_weight_format(tmp_path)


def test_hostile_numbers_in_a_gguf_header_are_refused(tmp_path: Path) -> None:
    huge = 2**63
    for content in (
        b"GGUF" + struct.pack("<IQQ", 3, 0, huge),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, huge) + b"x" * 70_000,
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 2, 1) + b"k" + struct.pack("<IIQ", 9, 8, huge),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 2, 1) + b"k" + struct.pack("<IQ", 8, huge),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 2, 1) + b"k" + struct.pack("<I", 77),
    ):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.gguf: not a GGUF file"):
            stored_weight_format(tmp_path)


def test_settings_in_the_separate_file_of_older_folders_are_read(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 128}))
    assert stored_weight_format(folder) == "int8"
