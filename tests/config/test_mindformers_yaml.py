"""Tests reading a MindFormers YAML. Context and sizes are read and checked. All other keys are listed with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.backends.runtime import prepare_graph_dumps
from llm_serving.config import load_config
from llm_serving.config.mindformers import KEYS_READ, MindSporeContext, read_mindformers_yaml
from llm_serving.errors import ConfigError
from llm_serving.formats.strict_yaml import read_yaml_mapping
from llm_serving.model.rope import RopeScaling
from llm_serving.model.shape import ModelShape
from support.model_folders import write_model_folder

LLAMA2_7B = Path(__file__).resolve().parents[2] / "configs" / "llama" / "predict_llama2_7b.yaml"
SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 300}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mf.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def with_sizes(tmp_path: Path, **changes: object) -> Path:
    values = "".join(f"    {key}: {value}\n" for key, value in (SIZES | changes).items())
    return write(tmp_path, f"model:\n  model_config:\n{values}")


def shape_in(file: Path) -> ModelShape:
    shape = read_mindformers_yaml(file).shape
    assert shape is not None
    return shape


def test_llama2_7b() -> None:
    file = read_mindformers_yaml(LLAMA2_7B)
    assert file.context == MindSporeContext(
        device_target="Ascend",
        device_id=0,
        enable_graph_kernel=True,
        graph_kernel_flags="--enable_parallel_fusion=true --reduce_fuse_depth=8",
        max_call_depth=10000,
        max_device_memory_bytes=58 * 1024**3,
    )
    assert file.shape == ModelShape(
        architecture="LlamaForCausalLM",
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        hidden_act="silu",
        attention_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
    )


def test_every_documented_key_is_read_and_checked(tmp_path: Path) -> None:
    """The test gives a mapping as the value of each key. No key accepts a mapping, so each gives an error."""
    for key in KEYS_READ:
        *outer, last = key.split(".")
        sizes: dict[str, object] = dict(SIZES)
        document: dict[str, object] = {"context": {}, "model": {"model_config": sizes, "arch": {}}}
        inner: object = document
        for name in outer:
            assert isinstance(inner, dict)
            inner = inner[name]
        assert isinstance(inner, dict)
        inner[last] = {"a": 1}
        if last == "ffn_dim_multiplier":
            sizes["multiple_of"] = 1
        file = write(tmp_path, str(document).replace("'", '"'))
        with pytest.raises(ConfigError, match=f"{key} = "):
            read_mindformers_yaml(file)


def test_flags_of_an_ascend_have_no_effect_on_a_cpu(tmp_path: Path) -> None:
    file = write(tmp_path, "context: {enable_graph_kernel: True, graph_kernel_flags: '--opt_level=2'}\n")
    read = read_mindformers_yaml(file)
    assert (read.unused, read.unused_on("Ascend")) == ((), ())
    [flags] = read.unused_on("CPU")
    assert (flags.file, flags.key, flags.value) == (str(file), "context.graph_kernel_flags", "'--opt_level=2'")


@pytest.mark.parametrize(
    ("table", "context", "fuses"),
    [
        ("native", "{}", True),
        ("fused", "{}", False),
        ("native", "{enable_graph_kernel: False}", False),
        ("fused", "{enable_graph_kernel: True}", True),
    ],
)
def test_a_cpu_fuses_native_operators_unless_the_file_says_no(
    tmp_path: Path, table: str, context: str, fuses: bool
) -> None:
    file = read_mindformers_yaml(write(tmp_path, f"context: {context}\n"))
    model = write_model_folder(tmp_path / "model")
    settings = [f"model_config.model_path={model}", f"model_config.op_table={table}"]
    settings += ["model_config.model_dtype=bfloat16"]
    config = load_config("llama_tiny_cpu.yaml", settings, ascend=False)
    assert replace(config, context=file.context).fuses_operators == fuses


def test_keys_without_effect_are_listed_with_the_reason(tmp_path: Path) -> None:
    text = (
        "run_mode: predict\nseed: 7\nload_checkpoint: ''\nlayer_decay: 0.65\n"
        "context: {mode: 0, use_flash_attention: False, ascend_config: {precision_mode: must_keep_origin_dtype}}\n"
        "model: {model_config: {use_flash_attention: True, use_past: True, block_size: 16, compute_dtype: bfloat16}}\n"
    )
    file = write(tmp_path, text)
    read = read_mindformers_yaml(file)
    assert read.compute_dtype == "bfloat16"
    assert {each.file for each in read.unused} == {str(file)}
    assert {each.key: each.value for each in read.unused} == {
        "seed": "7",
        "layer_decay": "0.65",
        "context.use_flash_attention": "False",
        "context.ascend_config": "{...}",
        "model.model_config.block_size": "16",
    }
    reasons = {each.key: each.reason for each in read.unused}
    assert reasons["context.use_flash_attention"].startswith("attention always uses flash kernels")
    assert reasons["layer_decay"] == "not a setting of this server"


def test_the_sizes_of_a_qwen2_are_those_of_its_folder(tmp_path: Path) -> None:
    assert read_mindformers_yaml(with_sizes(tmp_path, qkv_has_bias=True)).shape is None


def test_llama3_scaling_is_read(tmp_path: Path) -> None:
    factor = "{factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192}"
    shape = shape_in(with_sizes(tmp_path, extend_method="LLAMA3", scaling_factor=factor))
    assert shape.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(("text", "level"), [("True", 1), ("False", 0), ("3", 3)])
def test_save_graphs(tmp_path: Path, text: str, level: int) -> None:
    context = read_mindformers_yaml(write(tmp_path, f"context: {{save_graphs: {text}, save_graphs_path: /g}}")).context
    assert (context.save_graphs, context.save_graphs_path) == (level, "/g")


def test_unknown_keys_of_a_mindformers_yaml_are_accepted(tmp_path: Path) -> None:
    anchors = (
        "train_dataset: &data {batch_size: 6}\ntask: {dataset_config: *data, merged: {<<: *data, batch_size: 7}}\n"
    )
    file = read_mindformers_yaml(write(tmp_path, anchors + "callbacks: [{type: Monitor}]\nlr: 5.e-5\n"))
    assert file.context == MindSporeContext()
    assert file.shape is None


def test_merge_keys_and_numbers(tmp_path: Path) -> None:
    text = (
        "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [5.e-5, 1e-5, 1.0, .5, -3, 0o17, 010, 1_000, yes, 1:30, 0x10, ~]\n"
    )
    assert read_yaml_mapping(write(tmp_path, text)) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [5e-5, 1e-5, 1.0, 0.5, -3, "0o17", "010", "1_000", "yes", "1:30", "0x10", None],
    }


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"hidden_size": 4096, "num_heads": 32, "multiple_of": 256}, 11008),
        ({"hidden_size": 8192, "num_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),
        ({"hidden_size": 5120, "num_heads": 40, "multiple_of": 256}, 13824),
        ({"intermediate_size": 999}, 999),
    ],
    ids=["llama2-7b", "llama2-70b", "llama2-13b", "given"],
)
def test_the_intermediate_size_is_computed(tmp_path: Path, changes: dict[str, object], size: int) -> None:
    assert shape_in(with_sizes(tmp_path, **changes)).intermediate_size == size


def test_position_interpolation_is_read(tmp_path: Path) -> None:
    shape = shape_in(with_sizes(tmp_path, extend_method="PI", scaling_factor=2.0))
    assert shape.rope_scaling == RopeScaling("linear", 2.0)
    shape = shape_in(with_sizes(tmp_path, seq_length=512, max_position_embedding=1024))
    assert shape.max_position_embeddings == 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("context: {mode: 2}", "context.mode = 2: must be from 0 to 1"),
        (
            "context: {graph_kernel_flags: --enable_paralel_fusion=true}",
            "context.graph_kernel_flags = '--enable_paralel_fusion=true': MindSpore 2.9.0 has no flag "
            "--enable_paralel_fusion; it has --composite_op_limit_size, ",
        ),
        (
            "context: {graph_kernel_flags: opt_level=2}",
            "context.graph_kernel_flags = 'opt_level=2': the word 'opt_level=2' does not begin with --; flags have",
        ),
        (
            "context: {device_target: GPU}",
            "context.device_target = 'GPU': is not supported; only auto or CPU or Ascend",
        ),
        ("context: {max_device_memory: 58}", "context.max_device_memory = 58: must be text"),
        ("context: {max_device_memory: 58MB}", "context.max_device_memory = '58MB': must be a size above 0 like"),
        ("context: {max_device_memory: 0GB}", "context.max_device_memory = '0GB': must be a size above 0 like"),
        ("context: {enable_graph_kernel: 1}", "context.enable_graph_kernel = 1: must be true or false"),
        ("context: {use_flash_attention: 1}", "context.use_flash_attention = 1: must be true or false"),
        ("context: {save_graphs: 4}", "context.save_graphs = 4: must be from 0 to 3"),
        ("context: {ascend_config: 1}", "context.ascend_config = 1: must be a mapping"),
        ("callbacks: {a: 1}", "callbacks = {'a': 1}: must be a list"),
        ("model: {model_config: {top_p: x}}", "model.model_config.top_p = 'x': must be an integer or a number"),
        (
            "model: {model_config: {hidden_size: 64, num_layers: 2, num_heads: 4, vocab_size: 300, "
            "extend_method: LLAMA3, scaling_factor: 8.0}}",
            "model.model_config.scaling_factor = 8.0: must be a mapping",
        ),
        ("context: [1]", "context = [1]: must be a mapping"),
        ("model: {model_config: {num_layers: 2}}", "model.model_config.hidden_size = (absent): must be an integer"),
    ],
)
def test_bad_value_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_mindformers_yaml(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "GPT2Config"}, "type = 'GPT2Config': is not supported; only LlamaConfig"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3: must divide num_heads = 4"),
        ({"num_heads": 6}, "num_heads = 6: does not divide hidden_size = 64"),
        ({"qkv_has_bias": 1}, "qkv_has_bias = 1: must be true or false"),
        ({"extend_method": "NTK"}, "extend_method = 'NTK': is not supported; only None or PI"),
        ({"compute_dtype": "int8"}, "compute_dtype = 'int8': is not supported; only float16 or"),
        ({"eos_token_id": 300}, "eos_token_id = 300: every id must be from 0 to 299"),
    ],
)
def test_bad_size_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    file = with_sizes(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_mindformers_yaml(file)
    assert str(caught.value).startswith(f"{file}: model.model_config.{message}")


QWEN3 = """
model:
  model_config:
    architectures: ["Qwen3ForCausalLM"]
    vocab_size: 300
    hidden_size: 64
    intermediate_size: 96
    num_hidden_layers: 3
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 32
    hidden_act: 'swiglu'
    max_position_embeddings: 512
    seq_length: 256
    rope_theta: 1000000.
    eos_token_id: 7
    compute_dtype: "bfloat16"
    layernorm_compute_dtype: "float32"
"""


def test_sizes_in_the_names_of_config_json(tmp_path: Path) -> None:
    """Sizes in a MindFormers YAML may have the names of ``config.json``.

    This YAML has the form of MindFormers 1.9's file for Qwen3.
    """
    shape = shape_in(write(tmp_path, QWEN3))
    assert (shape.architecture, shape.query_key_norm, shape.hidden_act) == ("Qwen3ForCausalLM", True, "silu")
    assert (shape.num_layers, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (3, 4, 2, 32)
    assert (shape.max_position_embeddings, shape.rope_theta, shape.eos_token_ids) == (512, 1e6, (7,))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_hidden_layers: 3", "num_hidden_layers: x", "num_hidden_layers = 'x': must be an integer"),
        ("Qwen3ForCausalLM", "GPT2LMHeadModel", "architectures = ['GPT2LMHeadModel']: is not supported"),
        ("'swiglu'", "'gelu'", "hidden_act = 'gelu': is not supported; only silu or swiglu"),
        ('"bfloat16"', '"int8"', "compute_dtype = 'int8': is not supported"),
        ("seq_length: 256", "seq_length: no", "seq_length = 'no': must be an integer"),
        ("num_key_value_heads: 2", "num_key_value_heads: 3", "num_key_value_heads = 3: must divide"),
    ],
)
def test_an_error_names_a_bad_size_in_the_names_of_config_json(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in QWEN3
    file = write(tmp_path, QWEN3.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_mindformers_yaml(file)
    assert str(caught.value).startswith(f"{file}: model.model_config.{message}")


def test_a_yaml_without_sizes_uses_those_of_the_model_folder(tmp_path: Path) -> None:
    """The YAML has the form of MindFormers' configs/qwen3/predict_qwen3.yaml."""
    text = "model:\n  model_config:\n    compute_dtype: bfloat16\n    rotary_dtype: bfloat16\n"
    assert read_mindformers_yaml(write(tmp_path, text)).shape is None
    with pytest.raises(ConfigError, match="compute_dtype = 'int4': is not supported"):
        read_mindformers_yaml(write(tmp_path, text.replace("compute_dtype: bfloat16", "compute_dtype: int4")))


def test_a_yaml_without_a_model_section_has_no_sizes(tmp_path: Path) -> None:
    assert read_mindformers_yaml(write(tmp_path, "context: {}")).shape is None


def test_mindspore_writes_graphs_only_if_save_graphs_asks_for_them() -> None:
    variables: dict[str, str] = {}
    prepare_graph_dumps(MindSporeContext(), variables)
    assert variables == {}
    prepare_graph_dumps(MindSporeContext(save_graphs=2, save_graphs_path="/graphs"), variables)
    assert variables == {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": "/graphs"}


def test_keys_of_mindformers_own_files_without_an_effect_are_accepted(tmp_path: Path) -> None:
    """The YAML has keys of MindFormers' files for DeepSeek V3 and PyNative mode.

    DeepSeek's sizes come from the model folder.
    """
    text = "context: {mode: 1, affinity_cpu_list: None}\nmodel: {model_config: {type: DeepseekV3Config, num_layers: 2}}"
    file = read_mindformers_yaml(write(tmp_path, text))
    assert file.shape is None
    assert {"context.mode", "context.affinity_cpu_list"} <= {each.key for each in file.unused}
