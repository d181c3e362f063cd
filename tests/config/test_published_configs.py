"""Tests the config files of this repository. Every file loads.

``llama_7b_kbk_pa_dyn.yaml`` has the keys and values of the same file in the published server (MindSpore's llm-serving).
"""

from __future__ import annotations

import re
from pathlib import Path

from llm_serving.config import load_config
from llm_serving.config.scheduler_section import SchedulerConfig
from llm_serving.config.sections import BasicInputsConfig, ExtraInputsConfig, PagedAttentionConfig, WarmupInputsConfig
from llm_serving.config.serving_section import DEFAULT_SERVER_PORT, ServingConfig
from llm_serving.formats.strict_yaml import read_yaml_mapping
from support.model_folders import write_model_folder
from support.small_configs import REPOSITORY

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "llama"

PUBLISHED_MODEL_CONFIG = {
    "model_name": "llama_7b",
    "max_generate_length": 4096,
    "end_token": 2,
    "seq_length": [4096],
    "vocab_size": 32000,
    "prefill_batch_size": [1],
    "decode_batch_size": [128],
    "zactivate_len": [4096],
    "model_type": "dyn",
    "seq_type": "static",
    "batch_waiting_time": 0.0,
    "decode_batch_waiting_time": 0.0,
    "batching_strategy": "continuous",
    "current_index": False,
    "page_attention": True,
    "model_dtype": "DataType.FLOAT16",
    "pad_token_id": 0,
    "backend": "kbk",
    "model_cfg_path": "predict_llama2_7b.yaml",
}


def test_the_file_has_the_published_keys_and_values() -> None:
    """This repository's file has the keys and values of the same file in the published MindSpore server.

    That server's file also sets ``server_port`` to 8835. This is our default, so our file omits the key.
    """
    document = read_yaml_mapping(CONFIGS / "llama_7b_kbk_pa_dyn.yaml")
    model = document.pop("model_config")
    assert isinstance(model, dict)
    assert model == PUBLISHED_MODEL_CONFIG | {"model_path": None, "device_target": "auto"}
    assert document == {
        "serving_config": {
            "agent_ports": [16002],
            "agent_ip": "127.0.0.1",
            "start_device_id": 0,
            "server_ip": "127.0.0.1",
        },
        "pa_config": {"num_blocks": 1024, "block_size": 16, "decode_seq_length": 4096},
        "tokenizer": {"type": "LlamaTokenizer", "vocab_file": None},
        "basic_inputs": {"type": "LlamaBasicInputs"},
        "extra_inputs": {"type": "LlamaExtraInputs"},
        "warmup_inputs": {"type": "LlamaWarmupInputs"},
    }


def test_the_published_config_loads(tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path / "llama2-7b",
        files=("model-00001-of-00002.safetensors", "tokenizer.model"),
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    )
    config = load_config("llama_7b_kbk_pa_dyn.yaml", [f"model_config.model_path={folder}"], ascend=False)
    model = config.model_config
    assert config.notes == ()
    assert (model.model_name, model.max_generate_length, config.end_token_ids) == ("llama_7b", 4096, (2,))
    assert (model.seq_length, model.vocab_size, model.prefill_batch_size) == ((4096,), 32000, (1,))
    assert (model.decode_batch_size, model.zactivate_len) == ((128,), (4096,))
    assert (model.model_type, model.seq_type, model.batching_strategy) == ("dyn", "static", "continuous")
    assert (model.batch_waiting_time, model.decode_batch_waiting_time) == (0.0, 0.0)
    assert (model.current_index, model.page_attention) == (False, True)
    assert (model.model_dtype, model.backend) == ("float16", "kbk")
    assert model.model_cfg_path == str(CONFIGS / "predict_llama2_7b.yaml")
    assert (config.device, config.op_table) == ("CPU", "fused")
    assert config.serving_config == ServingConfig((16002,), "127.0.0.1", 0, "127.0.0.1", 8835)
    assert config.pa_config == PagedAttentionConfig(1024, 16, 4096)
    assert config.tokenizer.type == "LlamaTokenizer"
    assert config.tokenizer_file == str(folder / "tokenizer.model")
    assert config.basic_inputs == BasicInputsConfig("LlamaBasicInputs")
    assert config.extra_inputs == ExtraInputsConfig("LlamaExtraInputs")
    assert config.warmup_inputs == WarmupInputsConfig("LlamaWarmupInputs")
    assert config.scheduler_config == SchedulerConfig("prefill_first", None, None, 1, 1024, None)
    assert config.max_model_len == 4096
    assert (config.max_num_seqs, config.max_prefill_seqs, config.max_num_batched_tokens) == (128, 1, 4096)


def test_the_published_deployment_without_weights_takes_its_sizes_from_mindformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    overrides = ["model_config.load_format=dummy", f"tokenizer.vocab_file={tmp_path / 'tokenizer.model'}"]
    config = load_config("llama_7b_kbk_pa_dyn.yaml", overrides, ascend=False)
    assert config.shape.num_parameters == 6_738_415_616, "Llama 2 7B as published"
    assert config.shape.intermediate_size == 11008
    assert config.model_config.model_path is None
    assert config.end_token_ids == (2,)
    assert config.model_config.pad_token_id == 0


def test_the_default_has_the_promised_ports_and_sizes(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}"])
    assert config.serving_config.server_port == 8835
    assert config.serving_config.agent_ports == (0,)
    assert config.model_config.decode_batch_size == (64,)
    assert config.pa_config == PagedAttentionConfig(2048, 16, 2048)
    assert read_yaml_mapping(CONFIGS / "llama_tiny_cpu.yaml")["model_config"]["model_path"] == "models/tiny_llama"  # type: ignore[index]


def test_pages_show_the_default_port_and_configs_do_not_repeat_it() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    ports = {port for page in pages for port in re.findall(r"http://127\.0\.0\.1:(\d+)", page.read_text())}
    open_webui = "3000"  # a recipe starts this program there
    assert ports - {open_webui} == {str(DEFAULT_SERVER_PORT)} == {"8835"}
    assert [path.name for path in CONFIGS.parent.rglob("*.yaml") if "server_port: 8835" in path.read_text()] == []
