"""Tests the command line: its exit codes and output streams. Mistakes are reported before any slow import."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llm_serving.cli import DEFAULT_CONFIG, launch_from_command_line
from llm_serving.config import load_config
from llm_serving.config.schema import section_keys
from llm_serving.config.sections import SECTIONS
from llm_serving.planning.machine import Machine
from llm_serving.version import __version__
from support.model_folders import write_model_folder
from support.time_limits import time_limit

REPOSITORY = Path(__file__).resolve().parents[2]
MACHINE = Machine(100 * 1024**3, "test machine")
RUN = "from llm_serving.cli import launch_from_command_line; launch_from_command_line()"


@pytest.fixture
def override(tmp_path: Path) -> str:
    return f"model_config.model_path={write_model_folder(tmp_path / 'model')}"


def test_model_and_port_are_short_for_settings(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "my model")
    short = launch_from_command_line(["--model", str(folder), "--port", "8080"], MACHINE)
    settings = [f"model_config.model_path={folder}", "model_config.model_name=null", "serving_config.server_port=8080"]
    named = load_config(DEFAULT_CONFIG, settings)
    for section in ("serving_config", "tokenizer", "scheduler_config"):
        expected = getattr(named, section)
        if section == "scheduler_config":
            expected = replace(expected, max_num_batched_tokens=2048)
        assert getattr(short.config, section) == expected
    assert short.config.model_name == "my-model"
    arguments = ["--model", str(folder), "--set", "model_config.model_name=other"]
    assert launch_from_command_line(arguments, MACHINE).config.model_name == "other"


def test_a_model_gets_the_longest_context_and_enough_blocks(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", max_position_embeddings=100_000)

    def sizes(*options: str) -> tuple[int, int]:
        config = launch_from_command_line(["--model", str(folder), *options], MACHINE).config
        return config.max_model_len, config.pa_config.num_blocks

    assert sizes() == (100_000, 6251)  # 6251 blocks are enough for one sequence of the maximum length
    assert sizes("--set", "pa_config.decode_seq_length=500") == (500, 2048)
    assert sizes("--set", "pa_config.num_blocks=100") == (99 * 16 + 1, 100)
    # The value ``auto`` gives all blocks that fit into memory, because the prefix cache can use every block.
    assert sizes("--set", "pa_config.num_blocks=auto")[1] > 100_000
    assert sizes("--config", "llama_tiny_cpu.yaml") == (2048, 2048)  # this config file states its own sizes


@pytest.mark.parametrize(("isa", "dtype"), [("avx2", "float32"), ("avx512_bf16", "bfloat16")])
def test_a_model_gets_the_type_that_suits_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, dtype: str
) -> None:
    folder = write_model_folder(tmp_path / "model")
    monkeypatch.setenv("LLM_KERNELS_ISA", isa)

    def model_dtype(*options: str) -> str:
        return launch_from_command_line(options, MACHINE).config.model_config.model_dtype

    assert model_dtype("--model", str(folder)) == dtype
    assert model_dtype("--model", str(folder), "--dtype", "float16") == "float16"
    assert model_dtype("--model", str(folder), "--config", "llama_tiny_cpu.yaml") == "float32"  # as the file states
    assert model_dtype("--config", "llama_tiny_cpu.yaml") == "float32"


def test_other_short_options_are_settings_too(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    short = ["--model", str(folder), "--host", "127.0.0.9", "--dtype", "bfloat16", "--quantize", "int8"]
    settings = ["serving_config.server_ip=127.0.0.9", "model_config.model_dtype=bfloat16"]
    settings += [f"model_config.model_path={folder}", "model_config.model_name=null", "model_config.weight_format=int8"]
    config = launch_from_command_line(short, MACHINE).config
    named = load_config(DEFAULT_CONFIG, settings)
    assert config.serving_config == named.serving_config
    assert config.model_config.weight_format == named.model_config.weight_format == "int8"
    assert config.model_config.model_dtype == named.model_config.model_dtype == "bfloat16"
    later = ["--set", "model_config.weight_format=int8_weight_only"]
    assert launch_from_command_line([*short, *later], MACHINE).config.model_config.weight_format == "int8_weight_only"


def test_the_printed_config_of_short_options_starts_the_same_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model_folder(tmp_path / "my model")
    options = ["--model", str(folder), "--host", "127.0.0.9", "--port", "0", "--dtype", "bfloat16"]
    options += ["--quantize", "int8", "--set", "pa_config.num_blocks=auto", "--set", "pa_config.block_size=auto"]
    with pytest.raises(SystemExit):
        launch_from_command_line([*options, "--print-config"], MACHINE)
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    first, again = (launch_from_command_line(each, MACHINE) for each in (options, ["--config", str(file)]))
    for section in (*SECTIONS, "shape", "context", "unused"):
        assert getattr(again.config, section) == getattr(first.config, section), section
    assert again.plan == first.plan


def test_launch_gets_the_loaded_config(override: str) -> None:
    arguments = ["--config", "llama_tiny_cpu.yaml", "--set", override, "--set", "serving_config.agent_ports=[0]"]
    launch = launch_from_command_line(arguments, MACHINE)
    assert launch.config == load_config("llama_tiny_cpu.yaml", [override, "serving_config.agent_ports=[0]"])
    assert launch.plan.available_bytes == MACHINE.available_bytes


@pytest.mark.parametrize(
    "arguments",
    [["--no-such-option"], ["--conf", "x"], ["stray"], ["--set"], ["--config", "no.yaml"], ["--set", "a=1"]],
    ids=" ".join,
)
def test_mistakes_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line(arguments, MACHINE)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "error: " in output.err


def test_plan_that_does_not_fit_exits_with_2(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line(["--set", override], Machine(1024**3 * 4 // 5, "test machine"))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the memory plan needs ")
    assert "  KV cache " in error


def test_check_prints_the_plan(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line(["--set", override, "--check"], MACHINE)
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["config", "model", "device", "lengths", "address", "memory"]
    assert lines[4] == "address    127.0.0.1, port 8835"
    assert lines[-1] == "  available       100.0 GiB  test machine"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["serving_config.api_keys_file=/none"], "serving_config.api_keys_file: /none: No such file or directory"),
        (["serving_config.tls_cert=/none", "serving_config.tls_key=/none"], "serving_config.tls_cert: "),
    ],
)
def test_check_finds_files_that_the_start_would_refuse(
    settings: list[str], problem: str, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for setting in [override, *settings] for option in ("--set", setting)]
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line([*options, "--check"], MACHINE)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert problem in output.err


def test_printed_config_loads_to_the_same(tmp_path: Path, override: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--set", override, "--set", "model_config.model_dtype=bfloat16", "--print-config"]
    arguments += ["--config", "llama_tiny_cpu.yaml"]
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line(arguments, MACHINE)
    assert caught.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    again, first = load_config(str(file)), load_config("llama_tiny_cpu.yaml", [override, arguments[3]])
    for section in SECTIONS:
        assert getattr(again, section) == getattr(first, section)
    assert again.shape == first.shape


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line(["--help"])
    assert caught.value.code == 0
    words = set(capsys.readouterr().out.split())
    assert {"--config", "--set", "--check", "--print-config", "--version", "examples:"} <= words
    for name, cls in SECTIONS.items():
        assert {name, *section_keys(cls)} <= words


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch_from_command_line(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"llm-serving {__version__}\n"


def test_a_mistake_is_reported_without_imports_of_numpy_or_mindspore() -> None:
    code = f"import sys\ntry:\n    {RUN}\nfinally:\n    print([m for m in ('numpy', 'mindspore') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, "--set", "pa_config.num_blocks=none"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=time_limit(30),
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert done.stderr == "error: command line: pa_config.num_blocks = 'none': must be an integer or auto, not text\n"
