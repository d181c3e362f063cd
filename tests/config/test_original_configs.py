"""Tests that configs of the published server (MindSpore's llm-serving) and of MindFormers load unchanged.

The tables below state the keys and values of three published files: ``llama_7b_kbk_pa_dyn.yaml``, ``llama_13b_fa.yaml``
and ``llama2_70b_dyn.yaml``. Only paths on this machine are given on the command line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llm_serving.cli import describe
from llm_serving.config import Config, load_config
from llm_serving.config.source import unused_lines
from llm_serving.errors import ConfigError
from llm_serving.planning.machine import Machine
from llm_serving.planning.memory_plan import plan_memory
from llm_serving.server.state import ServerSettings
from support.model_folders import write_model_folder

GRAPHS: dict[str, object] = {
    "prefill_model": ["/path/full_graph.mindir"],
    "decode_model": ["/path/inc_graph.mindir"],
    "argmax_model": "/path/argmax.mindir",
    "topk_model": "/path/topk.mindir",
    "prefill_ini": ["/path/prefill.ini"],
    "decode_ini": ["/path/decode.ini"],
    "post_model_ini": "/path/post_config.ini",
}
MODEL: dict[str, object] = {
    "model_name": "llama_7b",
    "max_generate_length": 4096,
    "end_token": 2,
    "seq_length": [4096],
    "vocab_size": 32000,
    "prefill_batch_size": [1],
    "decode_batch_size": [1],
    "zactivate_len": [512, 1024, 2048, 4096],
    "model_type": "dyn",
    "seq_type": "static",
    "batch_waiting_time": 0.0,
    "decode_batch_waiting_time": 0.0,
    "batching_strategy": "continuous",
    "current_index": False,
    "page_attention": True,
    "fastserve": True,
    "model_dtype": "DataType.FLOAT32",
    "pad_token_id": 0,
    "backend": "kbk",
    "model_cfg_path": "checkpoint_download/llama/llama_7b.yaml",
}
FASTSERVE: dict[str, object] = {
    "time_slice": 5,
    "rate": 1.5,
    "starve_waiting_time": 10,
    "use_predictor": False,
    "predictor_ckpt_path": "",
    "prompt_weight": 0.6,
    "decode_weight": 0.4,
    "device_target": "CPU",
    "device_id": 0,
}
DEPLOYMENT: dict[str, dict[str, object]] = {
    "model_path": GRAPHS,
    "model_config": MODEL,
    "serving_config": {
        "agent_ports": [14002],
        "start_device_id": 7,
        "server_ip": "localhost",
        "server_port": 19291,
    },
    "pa_config": {"num_blocks": 2048, "block_size": 16, "decode_seq_length": 4096},
    "fa_config": FASTSERVE,
    "tokenizer": {"type": "LlamaTokenizer", "vocab_file": "/home/user/tokenizer.model"},
    "basic_inputs": {"type": "LlamaBasicInputs"},
    "extra_inputs": {"type": "LlamaExtraInputs"},
    "warmup_inputs": {"type": "LlamaWarmupInputs"},
}
MINDFORMERS: dict[str, object] = {
    "seed": 0,
    "output_dir": "./output",
    "run_mode": "predict",
    "use_parallel": False,
    "load_checkpoint": "",
    "auto_trans_ckpt": False,
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "llama2_7b"},
    "parallel_config": {"model_parallel": 1, "pipeline_stage": 1},
    "context": {"mode": 0, "max_device_memory": "58GB", "device_id": 0},
    "model": {
        "model_config": {
            "type": "LlamaConfig",
            "batch_size": 1,
            "seq_length": 4096,
            "hidden_size": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "vocab_size": 32000,
            "multiple_of": 256,
            "rms_norm_eps": 1.0e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "ignore_token_id": -100,
            "compute_dtype": "float16",
            "layernorm_compute_type": "float32",
            "softmax_compute_type": "float32",
            "rotary_dtype": "float16",
            "param_init_type": "float16",
            "use_past": True,
            "scaling_factor": 1.0,
            "extend_method": "None",
            "use_flash_attention": True,
            "block_size": 16,
            "num_blocks": 1024,
            "is_dynamic": True,
            "qkv_concat": False,
            "offset": 0,
            "checkpoint_name_or_path": "llama2_7b",
            "repetition_penalty": 1,
            "max_decode_length": 512,
            "top_k": 3,
            "top_p": 1,
            "do_sample": False,
        },
        "arch": {"type": "LlamaForCausalLM"},
    },
    "processor": {"return_tensors": "ms", "type": "LlamaProcessor"},
}


def load(tmp_path: Path, *, ascend: bool = True, text: str = "", **changes: dict[str, object]) -> Config:
    """Loads the config ``DEPLOYMENT`` of the published MindSpore server, on a machine that has the files it names.

    ``changes`` replace keys in its sections. If ``text`` is given, it is the whole config file.
    """
    folder = write_model_folder(
        tmp_path / "llama2-7b",
        files=("model.safetensors", "tokenizer.model"),
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )
    (tmp_path / "mf.yaml").write_text(yaml.safe_dump(MINDFORMERS), encoding="utf-8")
    sections = {name: values | changes.get(name, {}) for name, values in DEPLOYMENT.items()}
    (tmp_path / "published.yaml").write_text(text or yaml.safe_dump(sections), encoding="utf-8")
    paths = (
        f"model_config.model_path={folder}",
        f"model_config.model_cfg_path={tmp_path / 'mf.yaml'}",
        f"tokenizer.vocab_file={folder}",
    )
    return load_config(str(tmp_path / "published.yaml"), paths, ascend=ascend)


def test_the_original_deployment_loads_and_its_values_count(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.device, config.op_table, config.serving_config.start_device_id) == ("Ascend", "native", 7)
    assert (config.pa_config.num_blocks, config.max_model_len, config.max_num_seqs) == (2048, 4096, 1)
    assert config.model_config.model_dtype == "float16", "compute_dtype replaces the published FLOAT32"
    assert "compute_dtype float16 of the MindFormers YAML is used" in config.notes[0]


def test_a_cpu_computes_in_the_published_float32(tmp_path: Path) -> None:
    config = load(tmp_path, ascend=False)
    assert (config.device, config.model_config.model_dtype, config.notes) == ("CPU", "float32", ())


def test_every_key_without_effect_is_listed_with_its_reason(tmp_path: Path) -> None:
    config = load(tmp_path)
    keys = {each.key for each in config.unused}
    ours = {f"model_path.{key}" for key in GRAPHS} | {f"fa_config.{key}" for key in FASTSERVE}
    assert ours | {"model_config.zactivate_len", "model_config.fastserve"} <= keys
    theirs = {"trainer", "processor", "parallel_config", "model.model_config.num_blocks", "model.model_config.top_k"}
    assert theirs <= keys
    assert not keys & {"context.max_device_memory", "model.model_config.compute_dtype", "model.model_config.use_past"}
    assert all(each.reason for each in config.unused)
    shown = describe(config, plan_memory(config, Machine(10**12, "test machine")))
    assert all(line in shown for line in unused_lines(config.unused))
    listed = ServerSettings.from_config(config).settings["without_effect"]
    assert isinstance(listed, list)
    assert {each["key"] for each in listed} == keys
    assert Config.from_json(config.to_json()).unused == config.unused


def test_a_key_stated_twice_with_one_value_is_accepted(tmp_path: Path) -> None:
    text = yaml.safe_dump(DEPLOYMENT).replace("  page_attention: true\n", "  page_attention: true\n" * 2)
    assert text.count("page_attention") == 2
    assert load(tmp_path, text=text).model_config.page_attention


def test_graphs_for_four_agents_make_four_agents(tmp_path: Path) -> None:
    graphs = {name: ["a", "b", "c", "d"] for name in ("prefill_model", "decode_model")}
    config = load(tmp_path, model_path=graphs, serving_config={"agent_ports": [15100, 15101, 15102, 15103]})
    assert config.parallel_config.tensor_parallel == 4
    assert "model_path.prefill_model has 4 graphs, so parallel_config.tensor_parallel is 4" in config.notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_path": {"prefill_model": "x"}}, "model_path.prefill_model = 'x': must be a list of text"),
        ({"model_path": {"argmax_model": 3}}, "model_path.argmax_model = 3: must be text, not an integer"),
        ({"model_path": {"prefil_model": []}}, "unknown key; did you mean 'prefill_model'"),
        (
            {"model_path": {"prefill_model": ["a", "b"]}},
            "has 2 graphs, and model_path.decode_model has 1; they must agree",
        ),
        ({"fa_config": {"rate": "fast"}}, "fa_config.rate = 'fast': must be a number, not text"),
        ({"fa_config": {"use_predictor": 1}}, "fa_config.use_predictor = 1: must be true or false"),
        ({"model_config": {"fastserve": "yes"}}, "model_config.fastserve = 'yes': must be true or false"),
        (
            {"model_path": {"prefill_model": ["a", "b"], "decode_model": ["c", "d"]}},
            "has 2 graphs, and serving_config.agent_ports has 1 ports; they must agree",
        ),
    ],
)
def test_wrong_kinds_are_refused(tmp_path: Path, changes: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **changes)
    assert message in str(caught.value)


def test_pretrained_model_dir_names_the_model_folder(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "qwen")
    mindformers = tmp_path / "predict.yaml"
    mindformers.write_text(f"pretrained_model_dir: {folder}\n", encoding="utf-8")
    config = load_config(
        "llama_tiny_cpu.yaml", ["model_config.model_path=null", f"model_config.model_cfg_path={mindformers}"]
    )
    assert config.model_config.model_path == str(folder)
    mindformers.write_text("pretrained_model_dir: /path/hf_dir\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pretrained_model_dir = '/path/hf_dir' does not exist"):
        load_config(
            "llama_tiny_cpu.yaml", ["model_config.model_path=null", f"model_config.model_cfg_path={mindformers}"]
        )
