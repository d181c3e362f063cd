"""Models that read images: their sizes, how their images are prepared, and settings that they do not work with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_serving.config import load_config
from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.model.families import FAMILIES
from llm_serving.model.shape import ModelShape
from llm_serving.model.vision import read_processing
from llm_serving.planning.rank_memory import device_items
from performance.models.vision import (
    IMAGE_TOKEN,
    PREPROCESSOR,
    TEXT,
    VISION,
    config_json,
    tensor_shapes,
    write_vision_model,
)
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


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.vision])
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
        assert (shape.vision.image_token_id, shape.vision.tile_rows, shape.vision.num_patches) == (IMAGE_TOKEN, 9, 36)


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
        read_processing(tmp_path, vision)
    write_json(tmp_path / "processor_config.json", {"image_processor": PREPROCESSOR})
    assert read_processing(tmp_path, vision) == read_processing(model, vision)
    for changes, phrase in (
        ({"do_normalize": False}, "do_normalize = False: is not supported"),
        ({"resample": 0}, "resample = 0: is not supported; only 1 (lanczos)"),
        ({"max_image_size": {"longest_edge": 64}}, "must have the image_size of config.json, which is 48"),
        ({"image_std": [0.5, 0.0, 0.5]}, "must be three numbers above 0"),
    ):
        write_json(tmp_path / "preprocessor_config.json", {**PREPROCESSOR, **changes})
        with pytest.raises(CheckpointError) as refused:
            read_processing(tmp_path, vision)
        assert phrase in str(refused.value)


@pytest.mark.parametrize(
    ("override", "phrase"),
    [
        ("model_config.op_table=native", "the native operators have no vision encoder"),
        ("parallel_config.data_parallel=2", "needs one agent with the whole model"),
        ("parallel_config.tensor_parallel=2", "needs one agent with the whole model"),
        ("image_config.max_tiles=9", "an image of this model may have 10 tiles; set at least 10"),
        ("lora_config.max_adapters=1", "has no adapters yet"),
        ("parallel_config.executor=nodes", "whose pixels are not sent to other machines yet"),
    ],
)
def test_settings_that_do_not_work_with_images_are_refused(
    tmp_path: Path, model: Path, override: str, phrase: str
) -> None:
    dtype = "float16" if "native" in override else "float32"
    settings = [f"model_config.model_path={model}", f"model_config.model_dtype={dtype}", *LENGTHS, override]
    with pytest.raises(ConfigError) as refused:
        load_config("llama_tiny_cpu.yaml", small_overrides(tmp_path, settings))
    assert phrase in str(refused.value)


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
