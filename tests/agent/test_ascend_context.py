"""Tests how MindSpore is set up for an Ascend.

A recorder replaces MindSpore and notes the calls, because no test machine has an Ascend.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from agent.backends.ascend.communication import join_group
from agent.backends.ascend.context import environment, jit_config, prepare_environment, set_up_device
from agent.backends.ascend.limits import check_limits
from agent.backends.ascend.memory import check_device_memory
from agent.group.model_part import ModelPart
from agent.warm_up import captured_steps
from llm_serving.config import Config, load_config, mindformers_models
from llm_serving.errors import AgentStartError, ConfigError
from llm_serving.executor.agent_executor import AgentExecutor
from llm_serving.executor.agent_process import bind_agent_ports
from llm_serving.executor.base import AgentLost
from llm_serving.model.families import Experts
from support.executor_steps import events_until
from support.time_limits import time_limit

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Replaces the module ``mindspore`` and records the calls of its functions in order."""

    GRAPH_MODE = 0

    def __init__(self, devices: int = 8, refusal: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._devices, self._refusal = devices, refusal
        self.device_context = SimpleNamespace(ascend=SimpleNamespace(device_count=lambda: self._devices))
        self.runtime = SimpleNamespace(
            set_memory=lambda **given: self.calls.append(("set_memory", given)),
            set_kernel_launch_capture=lambda *given: self.calls.append(("set_kernel_launch_capture", *given)),
        )

    def set_device(self, target: str, device: int) -> None:
        if self._refusal is not None:
            raise self._refusal
        self.calls.append(("set_device", target, device))

    def set_context(self, **given: Any) -> None:
        self.calls.append(("set_context", given))

    def set_recursion_limit(self, limit: int) -> None:
        self.calls.append(("set_recursion_limit", limit))


def published(*overrides: str) -> Config:
    """Loads llama_7b_kbk_pa_dyn.yaml, the config of the published MindSpore server, as on a machine with an Ascend."""
    given = ["model_config.load_format=dummy", "tokenizer.vocab_file=models/tiny_llama", *overrides]
    return load_config("llama_7b_kbk_pa_dyn.yaml", given, ascend=True)


def with_context(tmp_path: Path, **values: str) -> Config:
    """Writes configs/llama/predict_llama2_7b.yaml, the MindFormers YAML of the published server, with other values in
    ``context``.

    Returns a config that refers to this file.
    """
    text = (ROOT / "configs/llama/predict_llama2_7b.yaml").read_text(encoding="utf-8")
    for key, value in values.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {key}:")]
        text = text.replace(line, f"  {key}: {value}")
    (tmp_path / "predict.yaml").write_text(text, encoding="utf-8")
    return published(f"model_config.model_cfg_path={tmp_path / 'predict.yaml'}")


def test_settings_of_the_published_deployment() -> None:
    mindspore = Recorder()
    set_up_device(published(), mindspore)
    assert mindspore.calls == [
        ("set_device", "Ascend", 0),
        ("set_context", {"mode": 0, "jit_config": {"jit_level": "O0", "infer_boost": "on"}}),
        ("set_recursion_limit", 10000),
        ("set_memory", {"max_size": "58GB"}),
    ]


def test_memory_limit_and_call_depth_come_from_the_config(tmp_path: Path) -> None:
    mindspore = Recorder()
    set_up_device(with_context(tmp_path, max_device_memory='"29.5GB"', max_call_depth="600"), mindspore)
    assert mindspore.calls[2:] == [("set_recursion_limit", 600), ("set_memory", {"max_size": "29.5GB"})]


@pytest.mark.parametrize(
    ("backend", "fused", "wanted"),
    [
        ("kbk", "False", {"jit_level": "O0", "infer_boost": "on"}),
        ("kbk", "True", {"jit_level": "O0", "infer_boost": "on"}),
        ("ge", "False", {"jit_level": "O2", "infer_boost": "off"}),
    ],
)
def test_jit_level_and_infer_boost(tmp_path: Path, backend: str, fused: str, wanted: dict[str, str]) -> None:
    with_context(tmp_path, enable_graph_kernel=fused)
    config = published(f"model_config.model_cfg_path={tmp_path / 'predict.yaml'}", f"model_config.backend={backend}")
    assert jit_config(config) == wanted


def test_fusion_flags_are_set_only_with_fusion(tmp_path: Path) -> None:
    published_flags = "--enable_parallel_fusion=true --reduce_fuse_depth=8"
    added = "--opt_level=2 --enable_dynamic_shape_fusion=true --dump_as_text=true"
    assert environment(published())["MS_DEV_GRAPH_KERNEL_FLAGS"] == f"{added} {published_flags}"
    assert "MS_DEV_GRAPH_KERNEL_FLAGS" not in environment(with_context(tmp_path, enable_graph_kernel="False"))
    with_context(tmp_path, enable_graph_kernel="True")
    graph_engine = published(f"model_config.model_cfg_path={tmp_path / 'predict.yaml'}", "model_config.backend=ge")
    assert "MS_DEV_GRAPH_KERNEL_FLAGS" not in environment(graph_engine)


def test_one_capture_for_each_decode_size(tmp_path: Path) -> None:
    config = published("model_config.capture_launches=True", "model_config.decode_batch_size=[1, 128, 16]")
    assert config.captured_batch_sizes == (1, 16, 128)
    assert environment(config)["MS_DEV_RUNTIME_CONF"] == "graph_capture_max_number:3"
    mindspore = Recorder()
    set_up_device(config, mindspore)
    assert ("set_kernel_launch_capture", True, []) in mindspore.calls
    assert [lens for lens, _ in captured_steps(config)] == [[1] * size for size in (128, 128, 16, 16, 1, 1)]
    assert published().captured_batch_sizes == ()
    assert "MS_DEV_RUNTIME_CONF" not in environment(published())


def test_nz_layout_is_enabled_for_integer_products_only() -> None:
    config = published("model_config.weight_format=int8", "model_config.weight_layout=nz")
    assert environment(config)["MS_INTERNAL_ENABLE_NZ_OPS"] == "QuantBatchMatmul"
    assert "MS_INTERNAL_ENABLE_NZ_OPS" not in environment(published("model_config.weight_format=int8"))


@pytest.mark.parametrize(
    ("weight_format", "layout", "wanted"),
    [("int8", "nd", "GroupedMatmulV4"), ("int8", "nz", "QuantBatchMatmul,GroupedMatmulV4"), ("auto", "nd", None)],
)
def test_int8_experts_always_have_the_nz_layout(weight_format: str, layout: str, wanted: str | None) -> None:
    given = [f"model_config.weight_format={weight_format}", f"model_config.weight_layout={layout}"]
    given += ["model_config.load_format=dummy", "tokenizer.vocab_file=models/tiny_llama"]
    config = load_config("qwen3_30b_a3b_int8_kbk_pa_dyn.yaml", given, ascend=True)
    assert environment(config).get("MS_INTERNAL_ENABLE_NZ_OPS") == wanted


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("weight_layout=nz",),
            "model_config.weight_layout = 'nz': needs weight_format int8, and it is",
        ),
        (("capture_launches=True", "backend=ge"), "cannot be used with model_config.backend ge, which"),
    ],
)
def test_options_that_exclude_each_other_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        published(*[f"model_config.{each}" for each in overrides])


def grouped(*overrides: str) -> Config:
    return published("model_config.capture_launches=True", "serving_config.agent_ports=[0]", *overrides)


def test_agents_of_a_stage_capture_all_collectives_but_all_gather() -> None:
    config, mindspore = grouped("parallel_config.tensor_parallel=2"), Recorder()
    set_up_device(config, mindspore)
    assert ("set_kernel_launch_capture", True, ["AllGather"]) in mindspore.calls


def test_capture_is_refused_for_several_stages() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be used with parallel_config\.pipeline_parallel above 1, as sends and"
    ):
        grouped("parallel_config.pipeline_parallel=2")


@pytest.mark.parametrize(("tensor", "pipeline", "wanted"), [(1, 1, None), (2, 1, "AIV"), (1, 2, None), (2, 2, None)])
def test_vector_cores_run_collectives_if_there_is_one_communicator(
    tensor: int, pipeline: int, wanted: str | None
) -> None:
    given = [f"parallel_config.tensor_parallel={tensor}", f"parallel_config.pipeline_parallel={pipeline}"]
    config = published(*given, "serving_config.agent_ports=[0]")
    assert environment(config).get("HCCL_OP_EXPANSION_MODE") == wanted
    variables = {"HCCL_OP_EXPANSION_MODE": "HOST"}
    prepare_environment(config, variables)
    assert variables["HCCL_OP_EXPANSION_MODE"] == "HOST"


def test_environment_variables_that_are_set_are_kept() -> None:
    variables = {"MS_ALLOC_CONF": "enable_vmm:False"}
    prepare_environment(published(), variables)
    assert variables == {
        "MS_ALLOC_CONF": "enable_vmm:False",
        "GLOG_v": "3",
        "RUN_MODE": "predict",
        "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST": "FlashAttentionScore,PagedAttention",
        "MS_DEV_GRAPH_KERNEL_FLAGS": environment(published())["MS_DEV_GRAPH_KERNEL_FLAGS"],
    }


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "FlashAttentionScore,PagedAttention"),
        ("AddRmsNormQuantV2", "AddRmsNormQuantV2,FlashAttentionScore,PagedAttention"),
        ("PagedAttention,FlashAttentionScore,MatMul", "PagedAttention,FlashAttentionScore,MatMul"),
    ],
)
def test_a_list_of_disabled_kernels_keeps_its_names_and_gets_ours(given: str, wanted: str) -> None:
    variables = {"MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST": given}
    prepare_environment(published(), variables)
    assert variables["MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"] == wanted


def test_variables_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", SimpleNamespace())
    for name in ("GLOG_v", "RUN_MODE", "MS_ALLOC_CONF", "MS_DEV_GRAPH_KERNEL_FLAGS"):
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST", raising=False)
    with pytest.raises(AgentStartError, match=r"could be set: MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST$"):
        prepare_environment(published())
    monkeypatch.setenv("MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST", "PagedAttention,FlashAttentionScore")
    prepare_environment(published())


SPY = """
import json, os, sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "mindspore" and not os.path.exists(os.environ["SPY_FILE"]):
            with open(os.environ["SPY_FILE"], "w") as file:
                json.dump({"argv": sys.argv, **os.environ}, file)

sys.meta_path.insert(0, Spy())
"""
"""A ``sitecustomize`` that writes the environment of a process to a file when mindspore is first imported."""


@pytest.mark.parametrize("config", ["llama_7b_kbk_pa_dyn.yaml", "qwen3_mindformers.yaml"])
def test_a_real_agent_has_the_variables_when_it_imports_mindspore(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables for an Ascend are in the environment when an agent first imports MindSpore.

    This holds for our models and for those of MindFormers. After the import, the agent fails, because this machine has
    no Ascend.
    """
    monkeypatch.setattr(mindformers_models, "_missing_package", lambda: "")
    (tmp_path / "sitecustomize.py").write_text(SPY, encoding="utf-8")
    given = ["model_config.load_format=dummy", "tokenizer.vocab_file=models/tiny_llama"]
    loaded = load_config(config, [*given, "model_config.model_path=models/tiny_llama"], ascend=True)
    found = tmp_path / "environment.json"
    with bind_agent_ports("127.0.0.1", [0]) as listeners:
        with mock.patch.dict(os.environ, {"SPY_FILE": str(found), "PYTHONPATH": str(tmp_path)}):
            executor = AgentExecutor(loaded, listeners, tmp_path)
            executor.start()
        try:
            (lost,) = events_until(executor, AgentLost, 60)
        finally:
            executor.close()
    assert "Unsupported device target Ascend" in lost.error
    variables = json.loads(found.read_text(encoding="utf-8"))
    assert variables["argv"][0].endswith("agent/__main__.py")
    assert variables["MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"] == "FlashAttentionScore,PagedAttention"
    assert variables["RUN_MODE"] == "predict"


@pytest.mark.parametrize(
    ("start", "of_the_yaml", "rank", "wanted"), [(0, 0, 0, 0), (4, 0, 0, 4), (4, 0, 3, 7), (0, 2, 1, 3), (4, 2, 0, 4)]
)
def test_device_numbers(tmp_path: Path, start: int, of_the_yaml: int, rank: int, wanted: int) -> None:
    with_context(tmp_path, device_id=str(of_the_yaml))
    config = published(
        f"model_config.model_cfg_path={tmp_path / 'predict.yaml'}", f"serving_config.start_device_id={start}"
    )
    mindspore = Recorder()
    set_up_device(config, mindspore, rank)
    assert mindspore.calls[0] == ("set_device", "Ascend", wanted)


def test_a_missing_device_is_refused() -> None:
    mindspore = Recorder(devices=4)
    with pytest.raises(AgentStartError, match=r"start_device_id gives this agent device 4, but there are 4 devices"):
        set_up_device(published("serving_config.start_device_id=3"), mindspore, rank=1)
    assert [call[0] for call in mindspore.calls] == ["set_device"]


def test_mindspore_without_ascend_is_refused_with_a_remedy() -> None:
    mindspore = Recorder(refusal=RuntimeError("Unsupported device target Ascend. This process\nmore"))
    with pytest.raises(
        AgentStartError, match=r"cannot use Ascend device 0: Unsupported device target Ascend\. This process\. Install"
    ):
        set_up_device(published(), mindspore)
    assert mindspore.calls == []


def test_this_machine_without_an_ascend_is_refused(tmp_path: Path) -> None:
    """Starts the real runtime of an agent for an Ascend on this machine, which has none."""
    program = (
        "from llm_serving.config import load_config; from agent.backends.runtime import start_runtime\n"
        "start_runtime(load_config('llama_7b_kbk_pa_dyn.yaml', ['model_config.load_format=dummy', "
        f"'tokenizer.vocab_file={ROOT / 'models/tiny_llama'}'], ascend=True))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, timeout=time_limit(60),
    )  # fmt: skip
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "llm_serving.errors.AgentStartError: MindSpore cannot use Ascend device 0: Unsupported device"
    )
    assert last.endswith("or set device_target: CPU")


GIB = 1024**3


def with_memory(total: int, free: int, refusal: str = "") -> Any:
    """Returns a replacement for ``mindspore`` with these amounts of device memory.

    It reports 0 bytes until an operator has run, as a device does before it is opened.
    """
    properties = SimpleNamespace(total_memory=0, free_memory=0)

    class Tensor:
        def __init__(self, values: list[float]) -> None:
            self.values = values

        def __add__(self, other: int) -> Tensor:
            return self

        def asnumpy(self) -> None:
            if refusal:
                raise RuntimeError(refusal)
            properties.total_memory, properties.free_memory = total, free

    hal = SimpleNamespace(get_device_properties=lambda device, target: SimpleNamespace(**vars(properties)))
    return SimpleNamespace(hal=hal, Tensor=Tensor)


def test_a_device_that_cannot_run_an_operator_is_refused() -> None:
    with pytest.raises(AgentStartError, match=r"cannot run an operator: EL0004: out of memory; see docs/ascend\.md"):
        check_device_memory(published(), with_memory(1, 1, "EL0004: out of memory\nmore lines"))


def test_the_plan_fits_a_device_of_64_gib() -> None:
    plan = check_device_memory(published(), with_memory(64 * GIB, 60 * GIB))
    assert (plan.available_bytes, plan.available_from) == (58 * GIB, "max_device_memory")
    assert plan.fits


def test_a_plan_larger_than_the_free_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentStartError, match=r"20\.0 GiB \(free memory of Ascend device 0\): pa_config") as caught:
        check_device_memory(published(), with_memory(64 * GIB, 20 * GIB))
    (largest,) = re.findall(r"does not fit; the largest that does is (\d+)", str(caught.value))
    fitting = published(f"pa_config.num_blocks={largest}")
    assert check_device_memory(fitting, with_memory(64 * GIB, 20 * GIB)).fits
    with pytest.raises(AgentStartError):
        check_device_memory(published(f"pa_config.num_blocks={int(largest) + 1}"), with_memory(64 * GIB, 20 * GIB))


@pytest.mark.parametrize(
    ("free", "problem"),
    [(1, "not even the weights fit"), (13, "the weights leave no memory for a KV cache; lower scheduler_config")],
)
def test_a_device_that_is_too_small_for_one_block_is_refused(free: int, problem: str) -> None:
    with pytest.raises(AgentStartError, match=rf"needs \d+\.\d GiB, of {free}\.0 GiB \(free memory .*\): {problem}"):
        check_device_memory(published(), with_memory(64 * GIB, free * GIB))


def test_a_device_that_reports_no_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    plan = check_device_memory(published(), with_memory(0, 0))
    assert (plan.available_bytes, plan.available_from) == (58 * GIB, "max_device_memory")
    assert "device 0 does not report its memory" in caplog.text


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "block_size", "problem"),
    [
        (128, 32, 32, 256, r"block_size = 256; .* heads of 128 elements .* takes 16, 32, 64, 128"),
        (128, 32, 32, 48, r"block_size = 48; "),
        (256, 32, 32, 128, r"heads of 256 elements .* takes 16, 32, 64"),
        (40, 32, 32, 16, r"heads have 40 elements; .* multiples of 16 up to 256"),
        (272, 32, 32, 16, r"heads have 272 elements"),
        (128, 256, 1, 16, r"256 query heads of the model share a key-value head; .* at most 128"),
    ],
)
def test_shapes_that_the_attention_kernels_do_not_support_are_refused(
    head_dim: int, heads: int, kv_heads: int, block_size: int, problem: str
) -> None:
    config = published(f"pa_config.block_size={block_size}")
    shape = replace(config.shape, head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(AgentStartError, match=problem):
        check_limits(replace(config, shape=shape))


@pytest.mark.parametrize(
    ("changes", "heads", "block_size", "problem"),
    [
        ({"rank": 528}, 16, 128, "caches 592 elements of a token .* at most 576"),
        ({"rank": 500}, 16, 128, "latent vector has 500 elements; .* multiples of 16"),
        ({"rope_dim": 40}, 16, 128, "rotated key has 40 elements; .* multiples of 16"),
        ({}, 256, 128, "has 256 query heads for one latent vector; .* at most 128"),
        ({}, 16, 256, "block_size = 256; for latent attention .* takes 16, 32, 64, 128"),
    ],
)
def test_latent_vectors_that_the_attention_kernel_does_not_support_are_refused(
    changes: dict[str, int], heads: int, block_size: int, problem: str
) -> None:
    config = load_config("deepseek_v2_lite_kbk_pa_dyn.yaml", ["model_config.device_target=Ascend"], ascend=True)
    check_limits(config)
    assert config.shape.latent is not None
    shape = replace(config.shape, latent=replace(config.shape.latent, **changes), num_attention_heads=heads)
    cache = replace(config.pa_config, block_size=block_size)
    with pytest.raises(AgentStartError, match=problem):
        check_limits(replace(config, shape=shape, pa_config=cache))


def test_too_many_experts_for_a_grouped_product_are_refused() -> None:
    config = published()
    many = Experts(1025, 8, 64, normalised=True)
    with pytest.raises(AgentStartError, match=r"has 1025 experts in a layer; .* takes at most 1024:"):
        check_limits(replace(config, shape=replace(config.shape, experts=many)))
    check_limits(replace(config, shape=replace(config.shape, experts=replace(many, count=1024))))


def test_a_window_shorter_than_the_sequences_is_refused() -> None:
    config = published()
    windowed = replace(config, shape=replace(config.shape, sliding_window=1024))
    with pytest.raises(AgentStartError, match=r"window is 1024 tokens, .* may have 4096; .* to at most 1024"):
        check_limits(windowed)
    check_limits(replace(windowed, pa_config=replace(config.pa_config, decode_seq_length=1024)))


def test_limits_of_attention_with_sinks() -> None:
    """Attention with sinks has windows. It takes fewer query heads, and smaller caches."""
    config = load_config("gpt_oss_20b_kbk_pa_dyn.yaml", ["model_config.device_target=Ascend"], ascend=True)
    assert 0 < config.shape.sliding_window < config.max_model_len
    check_limits(config)
    heads = replace(config.shape, num_attention_heads=66, num_key_value_heads=1)
    with pytest.raises(AgentStartError, match=r"66 query heads of the model share .* takes at most 64"):
        check_limits(replace(config, shape=heads))
    row = 128 * config.shape.num_key_value_heads * config.shape.head_dim
    most = (2**31 - 1) // row
    check_limits(replace(config, pa_config=replace(config.pa_config, num_blocks=most)))
    with pytest.raises(AgentStartError, match=f"num_blocks = {most + 1}; .* set num_blocks to at most {most}"):
        check_limits(replace(config, pa_config=replace(config.pa_config, num_blocks=most + 1)))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes_that_the_attention_kernels_support(block_size: int) -> None:
    check_limits(published(f"pa_config.block_size={block_size}"))


class Cluster:
    """Replaces ``mindspore.communication`` and records the calls."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._refusal = refusal
        self.communication = self

    def init(self, backend: str) -> None:
        if self._refusal is not None:
            raise self._refusal
        self.calls.append(("init", backend))

    def create_group(self, name: str, ranks: list[int]) -> None:
        self.calls.append(("create_group", name, ranks))


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "wanted"),
    [
        (1, 1, 0, []),
        (2, 1, 1, [("init", "hccl"), ("create_group", "stage", [0, 1])]),
        (2, 2, 3, [("init", "hccl"), ("create_group", "stage", [2, 3])]),
        (1, 2, 1, [("init", "hccl")]),
    ],
)
def test_the_agents_of_a_stage_form_an_hccl_group(tp: int, pp: int, rank: int, wanted: list[Any]) -> None:
    parallel = [f"parallel_config.tensor_parallel={tp}", f"parallel_config.pipeline_parallel={pp}"]
    cluster = Cluster()
    join_group(ModelPart.of(published(*parallel, "serving_config.agent_ports=[0]"), rank), cluster)
    assert cluster.calls == wanted


def test_an_agent_that_hccl_cannot_connect_does_not_start() -> None:
    part = ModelPart.of(published("parallel_config.tensor_parallel=2", "serving_config.agent_ports=[0]"), 0)
    with pytest.raises(AgentStartError, match="HCCL cannot connect the 2 agents of this group: EJ0001: no device"):
        join_group(part, Cluster(RuntimeError("EJ0001: no device\nmore")))
