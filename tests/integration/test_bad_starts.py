"""Tests that a wrong configuration stops the start within two seconds, with exit code 2 and a clear message.

No process or file is left.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from importlib.util import find_spec

import pytest

from performance.models.folders import write_model
from performance.models.variants import FAMILY_VARIANTS
from support.server_process import run_start_server
from support.small_configs import TINY_LLAMA, small_overrides
from support.time_limits import time_limit


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Starts the fork server, which imports the whole server, so that no test measures this time."""
    assert run_start_server("--version").returncode == 0


def start(tmp_path, *overrides, config="llama_tiny_cpu.yaml"):
    sets = [part for override in small_overrides(tmp_path, overrides) for part in ("--set", override)]
    begin = time.monotonic()
    run = run_start_server("--config", config, *sets)
    assert "ready" not in run.stdout
    return run, time.monotonic() - begin


BAD_CONFIGS = [
    (["pa_config.num_block=64"], "num_block", "num_blocks"),
    (["pa_config.num_blocks=many"], "pa_config.num_blocks", "many"),
    (["pa_config.num_blocks=-1"], "pa_config.num_blocks", "-1"),
    (["pa_config.block_size=0"], "pa_config.block_size", "0"),
    (["pa_config.num_blocks=3"], "num_blocks", "3"),
    (["model_config.batching_strategy=continous"], "batching_strategy", "continuous"),
    (["model_config.model_dtype=float8"], "model_dtype", "float8"),
    (["model_config.op_table=native"], "native", "float32"),
    (["model_config.page_attention=False", "scheduler_config.prefix_cache=True"], "page_attention", "prefix_cache"),
    (["model_config.current_index=True"], "current_index", "not available"),
    (["model_config.vocab_size=32000"], "vocab_size", "32000"),
    (["model_config.model_path=/nowhere/at/all"], "model_path", "/nowhere/at/all"),
    (["serving_config.server_ip=0.0.0.0"], "server_ip", "allow_remote"),
    (["serving_config.allow_remote=true"], "allow_remote", "allow_remote_unprotected"),
    (["serving_config.agent_ports=[1,2]"], "agent_ports", "[1, 2]"),
    (["serving_config.server_port=70000"], "server_port", "70000"),
    (["scheduler_config.policy=fastest"], "policy", "fcfs"),
    (["nosuch.key=1"], "nosuch", "section"),
    (["nonsense"], "nonsense", "="),
]


@pytest.mark.parametrize(("overrides", "first", "second"), BAD_CONFIGS, ids=lambda value: str(value)[:50])
def test_a_bad_config_is_refused_at_once(tmp_path, overrides, first, second, record_property):
    run, seconds = start(tmp_path, *overrides)
    is_clear = run.returncode == 2 and first in run.stderr and second in run.stderr and "Traceback" not in run.stderr
    record_property("unclear_mistakes", f"{not is_clear:d} of 1")
    assert run.returncode == 2, run.stderr
    assert first in run.stderr
    assert second in run.stderr
    assert "Traceback" not in run.stderr
    assert seconds < time_limit(2.0)


def test_an_unknown_config_file_names_those_there_are(tmp_path):
    run = run_start_server("--config", "llama_tiny.yaml")
    assert run.returncode == 2
    assert "llama_tiny_cpu.yaml" in run.stderr


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run, _ = start(tmp_path, f"serving_config.server_port={port}")
        assert run.returncode == 2
        assert str(port) in run.stderr
        run, _ = start(tmp_path, f"serving_config.agent_ports=[{port}]")
        assert run.returncode == 2
        assert "agent_ports" in run.stderr


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers(tmp_path):
    run, _ = start(tmp_path, "pa_config.num_blocks=60000000")
    assert run.returncode == 2
    assert "KV cache" in run.stderr
    assert "num_blocks" in run.stderr


def read_tensor_file(path):
    """Returns the header as a dictionary, and the bytes of the tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_tensor_file(path, header, tensors):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def huge_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")


def garbage(folder):
    (folder / "model.safetensors").write_bytes(b"not a checkpoint at all, but long enough to be read" * 10)


def wrong_shape(folder):
    header, tensors = read_tensor_file(folder / "model.safetensors")
    header["model.embed_tokens.weight"]["shape"].reverse()
    write_tensor_file(folder / "model.safetensors", header, tensors)


def wrong_dtype(folder):
    header, tensors = read_tensor_file(folder / "model.safetensors")
    header["model.norm.weight"]["dtype"] = "I16"
    write_tensor_file(folder / "model.safetensors", header, tensors)


def missing_tensor(folder):
    header, tensors = read_tensor_file(folder / "model.safetensors")
    header["model.norm.weird"] = header.pop("model.norm.weight")
    write_tensor_file(folder / "model.safetensors", header, tensors)


def index_outside(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = {"model.embed_tokens.weight": "../../../etc/passwd"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def only_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def bad_json(folder):
    (folder / "config.json").write_text("{not json")


def odd_heads(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 5}))


def unknown_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT5ForCausalLM"]}))


@pytest.mark.skipif(find_spec("mindformers") is not None, reason="the package mindformers is installed")
def test_mindformers_without_the_package_is_refused_at_once(tmp_path):
    folder = tmp_path / "model"
    write_model(FAMILY_VARIANTS["qwen3_tied"], folder)
    overrides = [f"model_config.model_path={folder}", "model_config.model_dtype=float16"]
    run, seconds = start(tmp_path, *overrides, "model_config.model_type=mindformers")
    assert run.returncode == 2, run.stderr
    assert "the package mindformers is not installed; install it with `make setup-mindformers`" in run.stderr
    assert "Traceback" not in run.stderr
    assert seconds < time_limit(2.0)


BAD_CHECKPOINTS = [
    (truncate, "model.safetensors"),
    (huge_header, "model.safetensors"),
    (garbage, "model.safetensors"),
    (wrong_shape, "model.embed_tokens.weight"),
    (wrong_dtype, "model.norm.weight"),
    (missing_tensor, "model.norm.weight"),
    (index_outside, "../../../etc/passwd"),
    (only_pickle, "pytorch_model.bin"),
    (bad_json, "config.json"),
    (odd_heads, "num_key_value_heads"),
    (unknown_architecture, "GPT5ForCausalLM"),
]


SWEPT_DAMAGES = (huge_header, garbage, wrong_dtype, missing_tensor, index_outside)
"""These run in ``make test-sweeps`` only, because ``tests/agent/test_weights.py`` covers them without a server."""


@pytest.mark.parametrize(
    ("damage", "phrase"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[pytest.mark.sweep] if case[0] in SWEPT_DAMAGES else [])
        for case in BAD_CHECKPOINTS
    ],
)
def test_a_bad_checkpoint_is_refused_by_name(tmp_path, damage, phrase, record_property):
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    damage(folder)
    run, _ = start(tmp_path, f"model_config.model_path={folder}")
    record_property("unclear_mistakes", f"{run.returncode not in (1, 2) or phrase not in run.stderr:d} of 1")
    assert run.returncode in (1, 2), run.stderr
    assert phrase in run.stderr
