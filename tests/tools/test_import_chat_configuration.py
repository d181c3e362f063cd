"""Tests tools/import_chat_configuration.py: each row of its table, its errors, its options, and the written config."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_serving.config import Config, load_config
from llm_serving.config.loader import parse_override
from llm_serving.formats.strict_yaml import read_yaml_mapping
from support.small_configs import REPOSITORY, TINY_LLAMA
from tools.chat_import.importing import Options, import_settings
from tools.chat_import.main import main
from tools.chat_import.names import ABSENT, DEVICES, IMPORTED, Absent, Imported
from tools.chat_import.settings import MAX_BYTES, MAX_DEPTH, MAX_SHOWN_CHARS, ImportFailedError, Setting, read_settings
from tools.chat_import.writing import write_checked

PROGRAM = REPOSITORY / "tools" / "import_chat_configuration.py"
MODEL = ("--set", f"model_config.model_path={TINY_LLAMA}")
VALUES: dict[str, tuple[Any, Any]] = {
    "serving_config.server_ip": ("localhost", "localhost"),
    "serving_config.server_port": (9001, 9001),
    "serving_config.admin_ip": ("127.0.0.2", "127.0.0.2"),
    "serving_config.admin_port": (9002, 9002),
    "serving_config.tls_cert": ("/tls/cert.pem", "/tls/cert.pem"),
    "serving_config.tls_key": ("/tls/key.pem", "/tls/key.pem"),
    "serving_config.cors_origins": ("*", ("*",)),
    "serving_config.max_connections": (77, 77),
    "serving_config.agent_start_timeout_s": (45, 45.0),
    "serving_config.step_timeout_s": (12.5, 12.5),
    "serving_config.drain_timeout_s": (7, 7.0),
    "serving_config.start_device_id": (3, 3),
    "model_config.model_path": (str(TINY_LLAMA), str(TINY_LLAMA)),
    "model_config.model_name": ("1e5", "1e5"),
    "model_config.task": ("text-generation", "generate"),
    "model_config.model_dtype": ("mindspore.bfloat16", "bfloat16"),
    "model_config.weight_format": ("W8A16", "int8_weight_only"),
    "model_config.device_target": ("cpu", "CPU"),
    "model_config.max_generate_length": (300, 300),
    "model_config.seq_length": (200, (200,)),
    "model_config.prefill_batch_size": (3, (3,)),
    "model_config.decode_batch_size": ([2, 5], (2, 5)),
    "model_config.batching_strategy": ("static", "static"),
    "model_config.batch_waiting_time": (0.25, 0.25),
    "model_config.decode_batch_waiting_time": (0.5, 0.5),
    "model_config.page_attention": (False, False),
    "model_config.end_token": (5, 5),
    "model_config.pad_token_id": (6, 6),
    "pa_config.block_size": (32, 32),
    "pa_config.num_blocks": (99, 99),
    "tokenizer.vocab_file": (str(TINY_LLAMA / "tokenizer.json"), str(TINY_LLAMA / "tokenizer.json")),
    "tokenizer.type": ("LlamaTokenizerFast", "LlamaTokenizerFast"),
    "parallel_config.tensor_parallel": (2, 2),
    "parallel_config.data_parallel": (3, 3),
    "parallel_config.pipeline_parallel": (2, 2),
    DEVICES: (2, 2),
    "scheduler_config.max_num_batched_tokens": (333, 333),
    "scheduler_config.max_waiting_requests": (44, 44),
    "scheduler_config.prefix_cache": (False, False),
    "log_config.level": ("WARN", "warning"),
    "log_config.path": ("/tmp/chat.log", "/tmp/chat.log"),
    "log_config.max_mib": (20, 20),
    "log_config.keep_files": (9, 9),
}
"""A value in the file, and the value in the loaded config, by key."""
OTHER_VALUES = {
    "continuous_batching": (True, "continuous"),
    "dynamic_batching": (True, "dynamic"),
    "max_queue_delay_microseconds": (500_000, 0.5),
    "device_ids": ([3, 4], 3),
}
"""As ``VALUES``, for rows that convert the value. By the first name of the row."""
OF_THE_MODEL = {"model_config.model_cfg_path", "model_config.vocab_size"}
"""Keys whose value depends on the model. They have a test of their own."""
COMPANIONS = {
    "serving_config.tls_cert": ("--set", "serving_config.tls_key=/tls/key.pem"),
    "serving_config.tls_key": ("--set", "serving_config.tls_cert=/tls/cert.pem"),
    "parallel_config.pipeline_parallel": ("--set", "parallel_config.tensor_parallel=1"),
}
"""Options that a key needs before the loader accepts it."""


def names_of(row: Imported | Absent) -> list[tuple[str, ...]]:
    """Returns the path of each name of a row, inside each of its objects."""
    inside = [(place, name) if place else (name,) for place in row.places for name in row.short_names]
    return [*((name,) for name in row.names), *inside]


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: value if len(path) == 1 else nested(path[1:], value)}


def write(folder: Path, document: Any) -> Path:
    file = folder / "configuration.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return file


def imported(folder: Path, document: Any, *options: str) -> Config:
    """Imports the document, and returns the config that the written file gives."""
    output = folder / "chat.yaml"
    assert main([str(write(folder, document)), "--output", str(output), *options]) == 0
    return load_config(str(output))


def refused(folder: Path, capsys: pytest.CaptureFixture[str], document: Any, *options: str) -> str:
    """Returns the error. Checks that nothing was written."""
    before = set(folder.iterdir())
    file = write(folder, document)
    code = main([str(file), "--output", str(folder / "chat.yaml"), *options])
    printed = capsys.readouterr()
    assert (code, printed.out) == (1, "")
    assert printed.err.startswith("error: ")
    assert set(folder.iterdir()) - before <= {file}
    return printed.err


def values_of(row: Imported) -> tuple[Any, Any]:
    return OTHER_VALUES.get(row.names[0] if row.names else "") or VALUES[row.targets[0].key]


@pytest.mark.parametrize(
    "row",
    [row for row in IMPORTED if row.targets[0].key not in OF_THE_MODEL],
    ids=lambda row: (row.names or row.short_names)[0],
)
def test_each_row_gives_its_key_the_right_value(tmp_path: Path, row: Imported) -> None:
    key = row.targets[0].key
    value, expected = values_of(row)
    real_key = "parallel_config.tensor_parallel" if key == DEVICES else key
    model = () if key == "model_config.model_path" else MODEL
    config = imported(tmp_path, nested(names_of(row)[0], value), *model, *COMPANIONS.get(key, ()))
    section, _, name = real_key.partition(".")
    assert getattr(getattr(config, section), name) == expected


@pytest.mark.parametrize("row", IMPORTED, ids=lambda row: (row.names or row.short_names)[0])
def test_all_names_of_a_row_are_equal(tmp_path: Path, row: Imported) -> None:
    value = "x.yaml" if "cfg_path" in row.targets[0].key else 77
    value = values_of(row)[0] if row.targets[0].key in VALUES else value
    results = []
    for path in names_of(row):
        changed = tuple(name.replace("_", "-").upper() for name in path)
        for names in (path, changed):
            settings = read_settings(write(tmp_path, nested(names, value)))
            result = import_settings(settings, Options(), tmp_path)
            assert (result.problems, result.notes) == ([], [])
            results.append(result.values)
    assert results == [results[0]] * len(results)
    assert results[0]


def test_the_path_of_a_mindformers_yaml_and_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("context: {mode: 0}\n")
    size = json.loads((TINY_LLAMA / "config.json").read_text())["vocab_size"]
    config = imported(tmp_path, {"model": {"config": "model.yaml"}, "vocab_size": size}, *MODEL)
    assert config.model_config.model_cfg_path == str(tmp_path / "model.yaml")
    assert config.model_config.vocab_size == size


def test_devices_give_the_first_device_and_the_number_of_agents(tmp_path: Path) -> None:
    config = imported(tmp_path, {"BackendConfig": {"npuDeviceIds": [[3, 4]]}}, *MODEL)
    assert config.serving_config.start_device_id == 3
    assert config.parallel_config.tensor_parallel == 2


@pytest.mark.parametrize("row", ABSENT, ids=lambda row: (row.names or row.short_names)[0])
def test_a_name_without_a_counterpart_is_a_note_or_needs_ignore(tmp_path: Path, row: Absent) -> None:
    odd = [1.5]
    for path in names_of(row):
        for value in [odd, *(row.harmless or ())]:
            result = import_settings(read_settings(write(tmp_path, nested(path, value))), Options(), tmp_path)
            assert result.values == {}
            is_note = row.harmless is None or value is not odd
            assert (len(result.notes), len(result.problems)) == ((1, 0) if is_note else (0, 1))
            [text] = result.notes or [result.problems[0].text]
            assert text.startswith(f"{'.'.join(path)} = ")
            assert row.reason in text


def test_a_boolean_is_not_a_harmless_number(tmp_path: Path) -> None:
    result = import_settings([Setting("top_k", "", "top_k", True)], Options(), tmp_path)
    assert [each.text.partition(":")[0] for each in result.problems] == ["top_k = true"]


def test_without_sampling_the_other_sampling_settings_are_notes(tmp_path: Path) -> None:
    sampling = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 3, "repetition_penalty": 1}
    document = {"a": sampling | {"max_new_tokens": 5}, "b": {"temperature": 0.7}}
    result = import_settings(read_settings(write(tmp_path, document)), Options(), tmp_path)
    assert len(result.notes) == len(sampling)
    problems = [each.text.partition(":")[0] for each in result.problems]
    assert problems == ["a.max_new_tokens = 5", "b.temperature = 0.7"]


def test_all_problems_are_listed_together_with_value_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "server": {"port": 0, "unheard of": {"x": None}},
        "seq_length": -5,
        "kv": {"magic": [1, 2]},
        "temperature": 0.5,
        "batch_size": 4,
    }
    error = refused(tmp_path, capsys, document, *MODEL)
    assert error.splitlines() == [
        f"error: {tmp_path / 'configuration.json'}: 5 of 6 settings cannot be imported",
        "  server.port = 0: must be an integer from 1 to 65535",
        "      use --set serving_config.server_port=VALUE; or --ignore server.port",
        '  "server.unheard of.x" = null: the table of names does not have this name',
        "      use --map 'server.unheard of.x'=SECTION.KEY; or --ignore 'server.unheard of.x'",
        "  seq_length = -5: must be at least 1 (model_config.max_generate_length: integer, 1 to 16777216)",
        "      use --set model_config.max_generate_length=VALUE; or --ignore seq_length",
        "  kv.magic = [1, 2]: the table of names does not have this name",
        "      use --map kv.magic=SECTION.KEY; or --ignore kv.magic",
        "  temperature = 0.5: has no counterpart: each request to /chat states it in gen_kwargs, and is greedy "
        "otherwise; serving_config.generation_config has defaults for OpenAI's endpoints",
        "      use --ignore temperature",
    ]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"port": 70000}, "port = 70000: must be an integer from 1 to 65535"),
        ({"port": "8000"}, 'port = "8000": must be an integer'),
        ({"port": True}, "port = true: must be an integer"),
        ({"server": {"port": 8000.0}}, "server.port = 8000.0: must be an integer"),
        ({"max_length": 512.0}, "max_length = 512.0: must be an integer or auto, not a number"),
        ({"max_length": [512]}, "max_length = [512]: must be "),
        ({"batch_size": [4, 0]}, "batch_size = [4, 0]: must be at least 1"),
        ({"batch_size": {}}, "batch_size = {}: must be "),
        ({"page_attention": 1}, "page_attention = 1: must be true or false"),
        ({"step_timeout": "30"}, 'step_timeout = "30": must be a number'),
        ('{"step_timeout": NaN}', "step_timeout = NaN: must be a finite number"),
        ({"dtype": "fp8"}, 'dtype = "fp8": must be one of auto, float16'),
        ({"log_level": 3}, "log_level = 3: must be one of debug"),
        ({"task": "text-to-speech"}, 'task = "text-to-speech": must be one of generate'),
        ({"device_target": "GPU"}, 'device_target = "GPU": must be one of ascend'),
        ({"continuous_batching": False}, "continuous_batching = false: must be true"),
        ({"batching_strategy": "lucky"}, 'batching_strategy = "lucky": unknown value'),
        ({"device_ids": [0, 2]}, "device_ids = [0, 2]: must be a list of consecutive device numbers"),
        ({"device_ids": [[0], [1]]}, "device_ids = [[0], [1]]: must be a list of consecutive device numbers"),
        ({"device_ids": []}, "device_ids = []: must be a list of consecutive device numbers"),
        ({"load_checkpoint": "llama.ckpt"}, 'load_checkpoint = "llama.ckpt": is a file of weights'),
        ({"eos_token_id": [1, 2]}, "eos_token_id = [1, 2]: must be an integer"),
        ({"max_queue_delay_microseconds": "5"}, 'max_queue_delay_microseconds = "5": must be a number'),
        ({"max_queue_delay_microseconds": 1e9}, "microseconds = 1000000000.0: must be 0 to 60000000 microsec"),
        ({"max_queue_delay_microseconds": -1}, "microseconds = -1: must be 0 to 60000000 microseconds"),
        ({"max_queue_delay_microseconds": 10**400}, "...: must be 0 to 60000000 microseconds"),
        ({"step_timeout": 10**400}, "...: must be a finite number"),
        ({"database": {"port": 5432}}, "database.port = 5432: the table of names does not have this name"),
    ],
)
def test_a_wrong_value_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: Any, problem: str
) -> None:
    error = refused(tmp_path, capsys, document)
    assert "1 of 1 settings cannot be imported" in error
    assert problem in error
    assert error.count("\n") == 3


def test_two_values_of_a_key_are_an_error_that_names_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"server": {"port": 8000}, "http": {"port": 9000}}
    error = refused(tmp_path, capsys, document, *MODEL)
    assert "http.port = 9000: server.port = 8000 gives serving_config.server_port another value" in error
    assert "--ignore server.port" in error
    assert "--ignore http.port" in error
    assert imported(tmp_path, document, *MODEL, "--ignore", "http").serving_config.server_port == 8000


def test_equal_values_of_a_key_are_no_conflict(tmp_path: Path) -> None:
    config = imported(tmp_path, {"server": {"port": 8000}, "server_port": 8000}, *MODEL)
    assert config.serving_config.server_port == 8000
    comment = (tmp_path / "chat.yaml").read_text()
    assert "#   server.port -> serving_config.server_port = 8000\n" in comment
    assert "#   server_port -> serving_config.server_port = 8000\n" in comment


@pytest.mark.parametrize(
    ("document", "sizes"),
    [
        ({"world_size": 2}, (2, 1, 1)),
        ({"world_size": 4, "dp": 2}, (2, 1, 2)),
        ({"dp": 2, "pp": 2, "world_size": 4}, (1, 2, 2)),
        ({"world_size": 4, "tp": 2, "dp": 2}, (2, 1, 2)),
    ],
)
def test_the_number_of_devices_is_divided(tmp_path: Path, document: Any, sizes: tuple[int, ...]) -> None:
    parallel = imported(tmp_path, document, *MODEL).parallel_config
    assert (parallel.tensor_parallel, parallel.pipeline_parallel, parallel.data_parallel) == sizes


@pytest.mark.parametrize("document", [{"world_size": 3, "dp": 2}, {"tp": 2, "world_size": 4}])
def test_numbers_of_devices_that_do_not_agree_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: Any
) -> None:
    error = refused(tmp_path, capsys, document, *MODEL)
    assert f"world_size = {document['world_size']}: is the number of all devices, and " in error


def test_the_number_of_devices_takes_account_of_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replicas = ("--set", "parallel_config.data_parallel=2")
    assert imported(tmp_path, {"world_size": 4}, *MODEL, *replicas).parallel_config.tensor_parallel == 2
    (tmp_path / "chat.yaml").unlink()
    capsys.readouterr()
    error = refused(tmp_path, capsys, {"world_size": 3}, *MODEL, *replicas)
    assert "world_size = 3: is the number of all devices, and --set parallel_config.data_parallel=2 needs " in error


def test_odd_names_and_paths_are_only_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(tmp_path, capsys, {"a\x1b[2J": 1}, *MODEL)
    assert '"a\\u001b[2J" = 1: the table of names does not have this name' in error
    assert "\x1b" not in error
    error = refused(tmp_path, capsys, {"model_path": "x" * 5000})
    assert "no such file or folder" in error


def test_map_imports_any_name_as_any_key(tmp_path: Path) -> None:
    document = {"net": {"listen": 8123}, "queue": {"order": "fcfs"}, "lanes": 6, "kind": "fp32"}
    options = [
        "--map", "net.listen=serving_config.server_port",
        "--map", "order=scheduler_config.policy",
        "--map", "lanes=model_config.decode_batch_size",
        "--map", "kind=model_config.model_dtype",
    ]  # fmt: skip
    config = imported(tmp_path, document, *MODEL, *options)
    assert config.serving_config.server_port == 8123
    assert config.scheduler_config.policy == "fcfs"
    assert config.model_config.decode_batch_size == (6,)
    assert config.model_config.model_dtype == "float32"


def test_map_precedes_the_table_and_its_values_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = imported(tmp_path, {"max_length": 80}, *MODEL, "--map", "max_length=model_config.seq_length")
    assert config.model_config.seq_length == (80,)
    assert config.model_config.max_generate_length > 80
    (tmp_path / "chat.yaml").unlink()
    capsys.readouterr()
    error = refused(tmp_path, capsys, {"lanes": 0}, *MODEL, "--map", "lanes=model_config.decode_batch_size")
    assert "lanes = 0: must be at least 1 (model_config.decode_batch_size: list of integers, 1 to 4096)" in error


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--map", "lanes"], "must be NAME=SECTION.KEY"),
        (["--map", "lanes=decode_batch_size"], "unknown section 'decode_batch_size'"),
        (["--map", "lanes=model_config.decode_batch_sise"], "did you mean 'decode_batch_size'?"),
        (["--map", "lanes=pa_config.decode_batch_size"], "did you mean 'model_config.decode_batch_size'?"),
        (["--map", "lanes=pa_config.num_blocks", "--map", "lanes=pa_config.block_size"], "has two keys"),
        (["--map", "lanes=pa_config.num_blocks", "--ignore", "lanes"], "--map and --ignore both name 'lanes'"),
        (["--set", "pa_config.lanes=3"], "unknown key 'pa_config.lanes'"),
    ],
)
def test_wrong_options_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert main([str(write(tmp_path, {"lanes": 1})), *options]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--map", "lane=pa_config.num_blocks"], ["--ignore", "lane"]])
def test_an_option_must_name_a_setting_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    error = refused(tmp_path, capsys, {"lanes": 1}, *options)
    assert f"{options[0]} lane" in error
    assert "the file has no setting of this name" in error


def test_ignore_leaves_out_a_name_or_an_object(tmp_path: Path) -> None:
    document = {"a": {"b": {"x": 1}, "port": 0}, "c": [{"y": 2}], "temperature": 0.3, "port": 8000}
    options = ["--ignore", "a", "--ignore", "c", "--ignore", "temperature"]
    config = imported(tmp_path, document, *MODEL, *options)
    assert config.serving_config.server_port == 8000
    comment = (tmp_path / "chat.yaml").read_text()
    assert "#   a: left out with --ignore (settings: 2)\n" in comment
    assert "#   c: left out with --ignore (settings: 1)\n" in comment


def test_set_replaces_a_value_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "serving_config.server_port=8001", "--set", "parallel_config.tensor_parallel=1"]
    config = imported(tmp_path, {"port": 0, "http": {"port": 3}, "device_num": 8}, *MODEL, *options)
    assert config.serving_config.server_port == 8001
    assert config.parallel_config.tensor_parallel == 1
    notes = capsys.readouterr().err
    assert "note: port = 0: replaced by --set serving_config.server_port\n" in notes
    assert "note: device_num = 8: replaced by --set parallel_config.tensor_parallel\n" in notes
    assert "#   serving_config.server_port = 8001\n" in (tmp_path / "chat.yaml").read_text()


def test_a_configuration_of_mindformers_chat_server(tmp_path: Path) -> None:
    document = {
        "server": {"host": "127.0.0.1", "port": 11111, "uvicorn_level": "info", "access_log": True},
        "web_demo": {"host": "0.0.0.0", "port": 7860},
        "model": {"config": "", "device_num": 1, "device_id": 2, "device_range": [0, 8], "rank_table_file": ""},
        "default_generation_args": {"do_sample": False, "top_p": 1, "top_k": 1, "temperature": 1, "max_length": 512},
    }
    config = imported(tmp_path, document, *MODEL, "--ignore", "device_range")
    assert (config.serving_config.server_ip, config.serving_config.server_port) == ("127.0.0.1", 11111)
    assert config.serving_config.start_device_id == 2
    assert config.max_model_len == 512


def test_a_model_config_of_mindformers(tmp_path: Path) -> None:
    sizes = {"type": "LlamaConfig", "seq_length": 256, "batch_size": 2, "block_size": 16, "num_blocks": 64}
    flags = {"compute_dtype": "float32", "use_past": True, "is_dynamic": True, "max_decode_length": 256}
    document = {"model": {"model_config": sizes | flags}, "parallel_config": {"model_parallel": 2, "data_parallel": 1}}
    config = imported(tmp_path, document, *MODEL)
    assert config.max_model_len == 256
    assert config.model_config.decode_batch_size == (2,)
    assert (config.pa_config.num_blocks, config.pa_config.block_size) == (64, 16)
    assert (config.parallel_config.tensor_parallel, config.model_config.model_dtype) == (2, "float32")


def test_keys_of_published_configs_keep_their_meaning(tmp_path: Path) -> None:
    document = {
        "model_config": {"seq_length": [64, 128], "max_generate_length": 256, "model_type": "dyn"},
        "serving_config": {"server_port": 8002, "agent_ports": [0], "prefill_batch_waiting_time": 0.125},
        "pa_config": {"num_blocks": 80, "block_size": 16, "decode_seq_length": 256},
        "fa_config": {"rate": 2},
    }
    config = imported(tmp_path, document, *MODEL)
    assert config.model_config.seq_length == (64, 128)
    assert config.model_config.batch_waiting_time == 0.125
    assert (config.pa_config.num_blocks, config.pa_config.decode_seq_length) == (80, 256)
    assert "#   fa_config.rate: no effect: FastServe's queues" in (tmp_path / "chat.yaml").read_text()


def test_a_single_sequence_length_is_that_of_the_whole_sequence(tmp_path: Path) -> None:
    config = imported(tmp_path, {"model_config": {"seq_length": 128}}, *MODEL)
    assert config.model_config.max_generate_length == 128


def test_a_configuration_in_the_form_of_mindie(tmp_path: Path) -> None:
    model = {"modelName": "chat", "modelWeightPath": str(TINY_LLAMA), "worldSize": 2, "npuMemSize": -1, "cpuMemSize": 5}
    document = {
        "Version": "1.0.0",
        "LogConfig": {"logLevel": "Info", "logFileSize": 20, "logFileNum": 3},
        "ServerConfig": {"ipAddress": "127.0.0.1", "port": 1025, "httpsEnabled": False},
        "BackendConfig": {
            "npuDeviceIds": [[0, 1]],
            "ModelDeployConfig": {"maxSeqLen": 400, "maxInputTokenLen": 300, "ModelConfig": [model]},
            "ScheduleConfig": {"cacheBlockSize": 16, "maxPrefillBatchSize": 2, "maxBatchSize": 6, "maxIterTimes": 64},
        },
    }
    ignored = [word for name in ("httpsEnabled", "cpuMemSize", "maxIterTimes") for word in ("--ignore", name)]
    config = imported(tmp_path, document, *ignored)
    assert (config.model_name, config.parallel_config.tensor_parallel) == ("chat", 2)
    assert config.max_model_len == 400
    assert config.max_prompt_len == 300
    assert (config.max_prefill_seqs, config.max_decode_seqs) == (2, 6)
    assert (config.log_config.max_mib, config.log_config.keep_files) == (20, 3)


def test_modelscopes_file_stands_for_its_folder_and_opens_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    document = {
        "framework": "pytorch",
        "task": "text-generation",
        "model": {"type": "llama"},
        "pipeline": {"type": "llama-text-generation-pipe"},
        "allow_remote": True,
    }
    output = tmp_path / "chat.yaml"
    assert main([str(write(folder, document)), "--output", str(output)]) == 0
    config = load_config(str(output))
    assert config.model_config.model_path == str(folder)
    assert config.model_config.task == "generate"
    assert config.serving_config.allow_remote is False


def test_a_relative_path_is_searched_in_the_folder_of_the_file(tmp_path: Path) -> None:
    shutil.copytree(TINY_LLAMA, tmp_path / "weights")
    config = imported(tmp_path, {"model_path": "weights", "vocab_file": "weights/tokenizer.json"})
    assert config.model_config.model_path == str(tmp_path / "weights")
    assert config.tokenizer_file == str(tmp_path / "weights" / "tokenizer.json")


def test_symbolic_links_stay_in_the_config(tmp_path: Path) -> None:
    """The targets of links change: of ``current`` with each model, of a certificate with each renewal."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "live").mkdir()
    for name in ("cert", "key"):
        (tmp_path / "archive" / f"{name}1.pem").write_text("x")
        (tmp_path / "live" / f"{name}.pem").symlink_to(f"../archive/{name}1.pem")
    (tmp_path / "current").symlink_to(TINY_LLAMA)
    key = str(tmp_path / "live" / "key.pem")
    imported(tmp_path, {"model_path": "current", "tls_cert": "live/cert.pem", "tls_key": key})
    sections = read_yaml_mapping(tmp_path / "chat.yaml")
    assert sections["model_config"]["model_path"] == str(tmp_path / "current")
    assert sections["serving_config"] == {
        "tls_cert": str(tmp_path / "live" / "cert.pem"),
        "tls_key": key,
        "agent_ports": [0],
    }


def test_a_link_to_the_file_belongs_to_the_folder_of_the_link(tmp_path: Path) -> None:
    """In a snapshot of a model store, each file is a link to a folder without names."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    (blobs / "1f").write_text(json.dumps({"task": "chat"}))
    (snapshot / "configuration.json").symlink_to(blobs / "1f")
    for path in TINY_LLAMA.iterdir():
        (snapshot / path.name).symlink_to(path)
    output = tmp_path / "chat.yaml"
    assert main([str(snapshot / "configuration.json"), "--output", str(output)]) == 0
    assert read_yaml_mapping(output)["model_config"]["model_path"] == str(snapshot)
    assert f'from "{snapshot / "configuration.json"}".\n' in output.read_text()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "must hold a JSON object, not list"),
        (b"", "not valid JSON"),
        (b'{"port": 1, "port": 2}', "duplicate key 'port'"),
        (b'{"a": {"x": 1, "x": 1}}', "duplicate key 'x'"),
        (b'{"port": "\xff"}', "is not UTF-8 text (byte 10)"),
        (b'{"model": "\\ud800"}', "not valid text"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", f"nested deeper than {MAX_DEPTH} levels"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "not valid JSON"),
        (b'{"a": "' + b"x" * MAX_BYTES + b'"}', f"at most {MAX_BYTES} are read"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, problem: str
) -> None:
    file = tmp_path / "configuration.json"
    file.write_bytes(content)
    assert main([str(file)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, problem in printed.err) == ("", True), printed.err
    assert printed.err.count("\n") == 1
    assert main([str(tmp_path / "missing.json")]) == 1


def test_the_largest_permitted_depth_is_read(tmp_path: Path) -> None:
    depth = MAX_DEPTH - 1
    [setting] = read_settings(write(tmp_path, '{"a": ' + "[" * depth + "]" * depth + "}"))
    assert setting.path == "a"


def test_an_existing_file_is_only_replaced_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = write(tmp_path, {"port": 8000}), tmp_path / "chat.yaml"
    output.write_text("mine")
    arguments = [str(file), "--output", str(output), *MODEL]
    assert main(arguments) == 2
    assert "chat.yaml: exists; --force replaces it" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert main([*arguments, "--force"]) == 0
    assert load_config(str(output)).serving_config.server_port == 8000
    assert main([str(file), "--output", str(file), "--force", *MODEL]) == 2
    assert json.loads(file.read_text()) == {"port": 8000}
    assert {path.name for path in tmp_path.iterdir()} == {"configuration.json", "chat.yaml"}


def test_a_file_that_appears_during_the_import_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "chat.yaml"
    output.write_text("mine")
    text = f"model_config:\n  model_path: {TINY_LLAMA}\n"
    with pytest.raises(ImportFailedError, match="exists; --force replaces it"):
        write_checked(text, output, force=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("chat.yaml", "mine")]


def test_a_config_that_the_loader_refuses_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(tmp_path, capsys, {"server": {"host": "0.0.0.0"}}, *MODEL)
    assert f"error: {tmp_path / 'chat.yaml'}: serving_config.server_ip = '0.0.0.0': other machines could" in error
    assert "serving_config.server_ip was imported from server.host; --set serving_config.server_ip=VALUE" in error
    unprotected = ["--set", "serving_config.allow_remote=true", "--set", "serving_config.allow_remote_unprotected=true"]
    config = imported(tmp_path, {"server": {"host": "0.0.0.0"}}, *MODEL, *unprotected)
    assert config.serving_config.server_ip == "0.0.0.0"


def test_with_force_a_refused_config_leaves_the_old_file(tmp_path: Path) -> None:
    output = tmp_path / "chat.yaml"
    output.write_text("mine")
    assert main([str(write(tmp_path, {"model_path": "/no/model"})), "--output", str(output), "--force"]) == 1
    assert output.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"configuration.json", "chat.yaml"}


def test_the_comment_shortens_long_values_but_not_the_file(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    imported(folder, {"description": "y" * 300}, *MODEL)
    comment = (folder / "chat.yaml").read_text()
    assert comment.startswith(f'# Made by tools/import_chat_configuration.py from "{folder / "configuration.json"}".\n')
    assert f'#   description = "{"y" * (MAX_SHOWN_CHARS - 4)}...: not needed: it describes the file\n' in comment


def test_names_and_values_stay_inside_the_comment(tmp_path: Path) -> None:
    odd = "x\npa_config:\n  num_blocks: 7 #\u2028"
    document = {odd: 1, "model_name": "chat", "description": odd}
    config = imported(tmp_path, document, *MODEL, "--ignore", odd)
    sections = read_yaml_mapping(tmp_path / "chat.yaml")
    assert sections["pa_config"] == {"decode_seq_length": "auto", "num_blocks": "auto", "block_size": "auto"}
    assert config.model_name == "chat"


@pytest.mark.parametrize("name", ["1e5", "0x1f", "1_000", "null", "true", "yes", "~", "1:30", "010", ".5", "-", "a"])
def test_texts_keep_their_type_in_the_yaml(tmp_path: Path, name: str) -> None:
    imported(tmp_path, {"log_path": name}, *MODEL)
    assert read_yaml_mapping(tmp_path / "chat.yaml")["log_config"] == {"path": name}


def test_secrets_are_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "api_keys": {"alice": "hunter2"},
        "db": {"passWord": "hunter2"},
        "server": {"api_key": "hunter2"},
        "x": {"client-secret": ["hunter2"]},
        "hf_token": "hunter2",
        "hub": {"apiToken": "hunter2", "tokens": ["hunter2"], "endpoint_token": "hunter2"},
        "token": {"value": "hunter2"},
        "auth": {"passphrase": "hunter2"},
        "users": [{"token": "hunter2"}],
    }
    error = refused(tmp_path, capsys, document, *MODEL)
    assert "11 of 11 settings cannot be imported" in error
    assert error.count("= (hidden): ") == 11
    assert "hunter2" not in error
    options = [word for name in document for word in ("--ignore", name)]
    imported(tmp_path, document, *MODEL, *options)
    assert "hunter2" not in (tmp_path / "chat.yaml").read_text() + capsys.readouterr().err


def test_tokens_of_a_text_are_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("end_token", "eosToken", "pad_token", "stop_tokens", "additional_special_tokens", "skip_special_tokens")
    names += ("max_token", "max_new_tokens", "min_tokens", "num_batched_tokens", "token_timeout", "tokenizer")
    document = {"x": {name: [["shown"]] for name in names}}
    assert refused(tmp_path, capsys, document, *MODEL).count('= [["shown"]]: ') == len(names)


def test_the_program_prints_the_config_and_needs_no_mindspore(tmp_path: Path) -> None:
    file = write(tmp_path, {"server": {"port": 8007}})
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "mindspore.py").write_text("raise AssertionError('the importer imports mindspore')\n")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(file), *MODEL],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "PYTHONPATH": str(blocked)},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f'# Made by tools/import_chat_configuration.py from "{file}".\n# Imported:\n')
    (tmp_path / "chat.yaml").write_text(done.stdout)
    assert load_config(str(tmp_path / "chat.yaml")).serving_config.server_port == 8007


def test_the_values_of_this_file_cover_the_table() -> None:
    assert {target.key for row in IMPORTED for target in row.targets} == set(VALUES) | OF_THE_MODEL
    for key in set(VALUES) - {DEVICES}:
        assert parse_override(f"{key}=null")[0] == key.partition(".")[0]
