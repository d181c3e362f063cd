"""Tests configs of models that read images: their sizes, how their images are prepared, and settings that they refuse.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llm_serving.config import Config, load_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.families import FAMILIES
from llm_serving.model.shape import ModelShape
from llm_serving.model.vision import read_processing
from llm_serving.planning.rank_memory import device_items
from performance.models import qwen_vision
from performance.models.heads import eagle_config
from performance.models.vision import (
    IMAGE_TOKEN,
    PREPROCESSOR,
    TEXT,
    VISION,
    config_json,
    tensor_shapes,
    write_vision_model,
)
from support.model_folders import write_model_folder
from support.small_configs import small_overrides, write_json


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "model"
    write_vision_model(folder)
    return folder


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    """Returns a folder with a changed ``config.json`` and no weights."""
    write_json(tmp_path / "config.json", {**config_json(), **changes})
    return tmp_path


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.vision == "llama"])
def test_a_family_is_found_by_architecture_or_model_type(tmp_path: Path, architecture: str) -> None:
    values = config_json(architecture)
    assert values["model_type"] == FAMILIES[architecture].model_type
    for name in ("named", "typed"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", values)
        values.pop("architectures", None)
        shape = ModelShape.from_hf_folder(tmp_path / name)
        assert (shape.architecture, shape.hidden_size) == (architecture, TEXT["hidden_size"])
        assert shape.vision is not None
        assert (shape.vision.image_token_id, shape.vision.rows_of(48 * 48)) == (IMAGE_TOKEN, 9)


def test_every_weight_is_counted(model: Path) -> None:
    sizes = []
    for _, shape in tensor_shapes():
        size = 1
        for number in shape:
            size *= number
        sizes.append(size)
    assert ModelShape.from_hf_folder(model).num_parameters == sum(sizes)


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"text_config": None}, "text_config = null: is missing"),
        ({"text_config": {**TEXT, "model_type": "mistral"}}, "text_config.model_type = 'mistral': is not supported"),
        ({"vision_config": {**VISION, "hidden_act": "gelu"}}, "vision_config.hidden_act = 'gelu'"),
        ({"vision_config": {**VISION, "num_channels": 4}}, "vision_config.num_channels = 4"),
        ({"vision_config": {**VISION, "num_attention_heads": 5}}, "does not divide hidden_size = 64"),
        ({"vision_config": {**VISION, "image_size": 56}}, "multiple of patch_size x scale_factor = 8 x 2"),
        ({"image_token_id": 320}, "image_token_id = 320: must be from 0 to 319"),
    ],
)
def test_sizes_that_are_not_supported_are_refused(tmp_path: Path, changes: dict[str, Any], phrase: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        ModelShape.from_hf_folder(folder_of(tmp_path, **changes))
    assert phrase in str(refused.value)


def test_newer_folders_have_the_preparation_in_another_file(tmp_path: Path, model: Path) -> None:
    vision = ModelShape.from_hf_folder(model).vision
    assert vision is not None
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        read_processing(tmp_path, vision, 1)
    write_json(tmp_path / "processor_config.json", {"image_processor": PREPROCESSOR})
    assert read_processing(tmp_path, vision, 1) == read_processing(model, vision, 1)
    for changes, phrase in (
        ({"do_normalize": False}, "do_normalize = False: is not supported"),
        ({"resample": 0}, "resample = 0: is not supported; only 1 (lanczos)"),
        ({"max_image_size": {"longest_edge": 64}}, "must have the image_size of config.json, which is 48"),
        ({"image_std": [0.5, 0.0, 0.5]}, "must be three numbers above 0"),
    ):
        write_json(tmp_path / "preprocessor_config.json", {**PREPROCESSOR, **changes})
        with pytest.raises(CheckpointError) as refused:
            read_processing(tmp_path, vision, 1)
        assert phrase in str(refused.value)


@pytest.mark.parametrize(
    ("override", "phrase"),
    [
        ("model_config.device_target=Ascend", "has not been run beside a device; use CPU"),
        ("image_config.max_tiles=9", "an image of this model may have 10 tiles; set at least 10"),
    ],
)
def test_settings_that_do_not_work_with_images_are_refused(
    tmp_path: Path, model: Path, override: str, phrase: str
) -> None:
    dtype = "float16" if "Ascend" in override else "float32"
    settings = [f"model_config.model_path={model}", f"model_config.model_dtype={dtype}", *LENGTHS, override]
    with pytest.raises(ConfigError) as refused:
        load_config("llama_tiny_cpu.yaml", small_overrides(tmp_path, settings), ascend="Ascend" in override)
    assert phrase in str(refused.value)


@pytest.mark.parametrize(
    ("method", "phrase"),
    [
        ("draft", "a draft model cannot read the images of SmolVLMForConditionalGeneration; set auto or off"),
        ("eagle", "an EAGLE-3 head cannot read the images of SmolVLMForConditionalGeneration; set auto or off"),
    ],
)
def test_drafts_need_a_model_without_images(tmp_path: Path, model: Path, method: str, phrase: str) -> None:
    folder = write_model_folder(tmp_path / "draft", vocab_size=TEXT["vocab_size"])
    if method == "eagle":
        write_json(folder / "config.json", eagle_config(TEXT) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    settings = [f"model_config.model_path={model}", *LENGTHS, f"speculative_config.method={method}"]
    settings += [f"speculative_config.model={folder}", "model_config.model_dtype=float32"]
    with pytest.raises(ConfigError, match=phrase):
        load_config("llama_tiny_cpu.yaml", small_overrides(tmp_path, settings), ascend=False)


LENGTHS = ("model_config.seq_length=[1024]", "model_config.max_generate_length=1024",
           "pa_config.decode_seq_length=1024")  # fmt: skip


def test_slots_budget_and_memory_know_the_tiles(tmp_path: Path, model: Path) -> None:
    config = load_config(
        "llama_tiny_cpu.yaml", small_overrides(tmp_path, [f"model_config.model_path={model}", *LENGTHS])
    )
    assert config == type(config).from_json(config.to_json())
    limits = config.slot_limits()
    assert limits.max_tiles == limits.max_tokens // 9 + 2 * limits.max_seqs
    # 36 patches x (2 layers x 32768 + 12288 weights), the scores and the connector: 3354624 multiplications.
    # A token takes 279552.
    assert config.tile_cost == 12
    items = {item.name: item for item in device_items(config, 0)}
    assert items["image tiles"].num_bytes == 512 * 9 * 96 * 4 + 128 * 48 * 48 * 3
    assert items["image decoding"].num_bytes == 2 * 16 * 1024 * 1024 * 16
    assert items["image encoder"].num_bytes > 4 * 100_000
    assert json.loads(config.to_json())["processing"]["longest_edge"] == 144


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "model"
    qwen_vision.write_qwen_vision_model(folder)
    return folder


def test_a_folder_of_qwen_has_its_text_model_at_the_top_or_apart(tmp_path: Path, qwen: Path) -> None:
    shape = ModelShape.from_hf_folder(qwen)
    assert shape.num_parameters == sum(math.prod(size) for _, size in qwen_vision.tensor_shapes())
    assert (shape.attention_bias, shape.rotary_sections, shape.rope_scaling) == (True, (4, 5, 3), None)
    values = qwen_vision.config_json()
    text = {key: values.pop(key) for key in qwen_vision.TEXT if key != "tie_word_embeddings"}
    rope = {**text.pop("rope_scaling"), "rope_type": "default", "rope_theta": text.pop("rope_theta")}
    del rope["type"]
    write_json(tmp_path / "config.json", values | {"text_config": text | {"rope_parameters": rope}})
    assert ModelShape.from_hf_folder(tmp_path) == shape


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"rope_scaling": None}, "mrope_section = (absent): must be three numbers that sum to half of the head size"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 3]}}, "which is 12"),
        ({"rope_scaling": {"type": "unknown", "mrope_section": [4, 5, 3]}}, "type = 'unknown'"),
        ({"vision_config": {**qwen_vision.VISION, "hidden_act": "gelu"}}, "vision_config.hidden_act = 'gelu'"),
        ({"vision_config": {**qwen_vision.VISION, "window_size": 25}}, "multiple of patch_size x spatial_merge_size"),
        ({"vision_config": {**qwen_vision.VISION, "fullatt_block_indexes": [3]}}, "a list of layers from 0 to 2"),
        ({"vision_config": {**qwen_vision.VISION, "out_hidden_size": 64}}, "of the text model, which is 96"),
        ({"vision_config": {**qwen_vision.VISION, "num_heads": 3}}, "x 4 does not divide hidden_size = 64"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type = 'llama'"),
    ],
)
def test_a_qwen_that_is_not_supported_is_refused(tmp_path: Path, changes: dict[str, Any], phrase: str) -> None:
    write_json(tmp_path / "config.json", {**qwen_vision.config_json(), **changes})
    with pytest.raises(CheckpointError) as refused:
        ModelShape.from_hf_folder(tmp_path)
    assert phrase in str(refused.value)


def test_the_config_limits_images_of_any_size(tmp_path: Path, qwen: Path) -> None:
    vision = ModelShape.from_hf_folder(qwen).vision
    assert vision is not None
    limits = [read_processing(qwen, vision, most) for most in (1, 200 * 64, 10**9)]
    assert {(each.min_pixels, each.max_pixels) for each in limits} == {(256, 12_800)}
    larger = {key: value for key, value in qwen_vision.PREPROCESSOR.items() if not key.endswith("_pixels")}
    for most, expected in ((None, 1280 * 64), (400 * 64, 400 * 64)):
        write_json(tmp_path / "preprocessor_config.json", larger)
        assert read_processing(tmp_path, vision, most or 10**9).max_pixels == expected
    for changes, phrase in (
        ({"patch_size": 14}, "patch_size = 14: must have the value of config.json, which is 4"),
        ({"min_pixels": 6400, "max_pixels": 12_800}, "must be at least 12800 and 4 times min_pixels"),
    ):
        write_json(tmp_path / "preprocessor_config.json", {**larger, **changes})
        with pytest.raises(CheckpointError) as refused:
            read_processing(tmp_path, vision, 10**9)
        assert phrase in str(refused.value)


def test_slots_budget_and_memory_know_images_of_any_size(tmp_path: Path, qwen: Path) -> None:
    settings = [f"model_config.model_path={qwen}", *LENGTHS, "image_config.max_tiles=10"]
    config = load_config("llama_tiny_cpu.yaml", small_overrides(tmp_path, settings))
    assert config == type(config).from_json(config.to_json())
    limits = config.slot_limits()
    assert limits.shifts_positions
    assert limits.max_tiles == limits.max_tokens // 4 + 2 * limits.max_seqs
    # 800 patches. One layer has full attention, two have windows of 36 patches. Then 200 rows are joined.
    linear, attention = 800 * (3 * 64 * (4 * 64 + 3 * 112) + 96 * 64), 2 * 800 * 64 * (800 + 2 * 36)
    assert config.tile_cost == (linear + attention + 200 * 256 * (256 + 96)) // config.shape.num_linear_parameters
    items = {item.name: item for item in device_items(config, 0)}
    assert items["image tiles"].num_bytes == 512 * 64 * 96 * 4 + 10 * 12_800 * 3


def test_each_agent_of_the_first_stage_has_an_encoder(tmp_path: Path, qwen: Path) -> None:
    alone, shared, stages = (
        load_config(
            "llama_tiny_cpu.yaml", small_overrides(tmp_path, [f"model_config.model_path={qwen}", *LENGTHS, *more])
        )
        for more in ((), ("parallel_config.tensor_parallel=2",), ("parallel_config.pipeline_parallel=2",))
    )

    def sizes(config: Config, rank: int) -> list[int]:
        items = {item.name: item.num_bytes for item in device_items(config, rank)}
        return [items[f"image {name}"] for name in ("encoder", "tiles", "decoding")]

    encoder, tiles, decoding = sizes(alone, 0)
    assert [sizes(stages, rank) for rank in range(2)] == [[encoder, tiles, decoding], [0, 0, 0]]
    whole_embedding, pixels = 320 * 96 * 4, 128 * 12_800 * 3
    assert sizes(shared, 0) == [encoder + whole_embedding, tiles, decoding]
    assert sizes(shared, 1) == [encoder + whole_embedding, tiles - pixels, 0]


def test_native_operators_read_images(tmp_path: Path, model: Path, qwen: Path) -> None:
    native = ("model_config.op_table=native", "model_config.model_dtype=float16", *LENGTHS)
    for folder, has_dimensions in ((model, False), (qwen, True)):
        overrides = small_overrides(tmp_path, [f"model_config.model_path={folder}", *native])
        config = load_config("llama_tiny_cpu.yaml", overrides)
        assert config.processing
        assert config.reads_rotary_positions == has_dimensions
