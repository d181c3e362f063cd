"""Tests the namespace of blocks on disk, which depends on the weights and the settings."""

from __future__ import annotations

import os
import shutil

import pytest

from llm_serving.errors import CheckpointError
from llm_serving.kvstore.identity import namespace_of, weights_digest, weights_state
from support.small_configs import TINY_LLAMA, small_config


@pytest.fixture
def model(tmp_path):
    shutil.copytree(TINY_LLAMA, tmp_path / "model")
    return tmp_path / "model"


def config_of(tmp_path, model, *overrides):
    return small_config(tmp_path, [f"model_config.model_path={model}", *overrides])


def test_weights_with_one_other_bit_have_another_digest_at_the_same_path_and_time(tmp_path, model):
    config = config_of(tmp_path, model)
    before = weights_digest(config, tmp_path)
    assert weights_digest(config, tmp_path) == before == weights_digest(config)
    weights = model / "model.safetensors"
    found = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert weights_digest(config, tmp_path) != before


def test_weights_that_change_while_the_server_runs_are_refused(tmp_path, model):
    """The agents may have read the file before it changed. The digest would then belong to other weights."""
    config = config_of(tmp_path, model)
    before = weights_state(config)
    assert weights_digest(config, expected=before) == weights_digest(config)
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="have changed since the start of the server"):
        weights_digest(config, expected=before)


def test_the_same_weights_at_another_path_have_the_same_digest(tmp_path, model):
    shutil.copytree(model, tmp_path / "moved")
    configs = [config_of(tmp_path, folder) for folder in (model, tmp_path / "moved")]
    assert len({namespace_of(config, weights_digest(config), "a") for config in configs}) == 1


def test_a_file_of_digests_that_is_damaged_is_not_used(tmp_path, model):
    config = config_of(tmp_path, model)
    before = weights_digest(config, tmp_path)
    (tmp_path / "digests.json").write_text('{"a": 1')
    assert weights_digest(config, tmp_path) == before


@pytest.mark.parametrize(
    "override",
    [
        "model_config.kv_format=int8",
        "model_config.weight_format=int8",
        "pa_config.block_size=32",
        "model_config.model_dtype=bfloat16",
        "parallel_config.tensor_parallel=2",
        "parallel_config.sum_parts=2",
    ],
)
def test_each_setting_that_changes_bits_changes_the_namespace(tmp_path, model, override):
    same, other = config_of(tmp_path, model), config_of(tmp_path, model, override)
    assert namespace_of(same, "w", "a") != namespace_of(other, "w", "a")


def test_other_weights_and_other_kernels_change_the_namespace(tmp_path, model):
    config = config_of(tmp_path, model)
    assert len({namespace_of(config, *facts) for facts in (("w", "a"), ("x", "a"), ("w", "b"))}) == 3
