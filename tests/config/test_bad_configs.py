"""Tests mistakes in a config. Each error names the file, the key, the value and the nearest valid value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llm_serving.config import load_config
from llm_serving.config.loader import parse_override
from llm_serving.errors import ConfigError
from support.bad_config_cases import CASES, FILE, Case
from support.model_folders import write_model_folder
from support.recorded import RecordProperty


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_error_names_the_mistake(case: Case, tmp_path: Path, record_property: RecordProperty) -> None:
    folder = write_model_folder(tmp_path / "model", **case.folder)  # type: ignore[arg-type]
    file = tmp_path / "broken.yaml"
    file.write_text(case.text.replace("<model>", str(folder)), encoding="utf-8")
    expected = case.message.replace(FILE, str(file)).replace("<model>", str(folder))
    with pytest.raises(case.error) as caught:
        load_config(str(file), [each.replace("<model>", str(folder)) for each in case.overrides], ascend=False)
    record_property("unclear_mistakes", f"{expected not in str(caught.value):d} of 1")
    assert expected in str(caught.value), str(caught.value)
    assert len(str(caught.value)) < 1200


def test_sizes_of_another_model(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    sizes = "hidden_size: 64, num_layers: 3, num_heads: 4, n_kv_heads: 2, vocab_size: 300, intermediate_size: 160"
    (tmp_path / "mf.yaml").write_text(f"model: {{model_config: {{{sizes}}}}}", encoding="utf-8")
    file = tmp_path / "c.yaml"
    file.write_text(f"model_config: {{model_path: {folder}, model_cfg_path: mf.yaml}}", encoding="utf-8")
    problem = (
        f"model_config.model_cfg_path = 'mf.yaml': is of another model than {folder}/config.json: num_layers 3 "
        "instead of 2"
    )
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {problem}")):
        load_config(str(file))
    config = load_config(str(file), [f"model_config.model_path={folder}"])
    assert config.notes == (f"{file}: {problem}; the model folder wins, as --set named it",)
    assert config.shape.num_layers == 2


def test_fused_operators_on_an_ascend(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    overrides = [f"model_config.model_path={folder}", "model_config.op_table=fused"]
    with pytest.raises(ConfigError, match=r"^command line: model_config.op_table = 'fused': the fused operators are"):
        load_config("llama_tiny_cpu.yaml", overrides, ascend=True)
    with pytest.raises(ConfigError, match=r"model_config.op_table = 'native': cannot be used with model_dtype float32"):
        load_config("llama_tiny_cpu.yaml", overrides[:1], ascend=True)


@pytest.mark.parametrize("case", [case for case in CASES if "the native operators have no" in case.message])
def test_an_ascend_refuses_what_the_native_operators_lack_and_names_the_cpu(case: Case, tmp_path: Path) -> None:
    """On a CPU, the error proposes another op table. An Ascend has only one, so there the error proposes a CPU."""
    folder = write_model_folder(tmp_path / "model", **case.folder)  # type: ignore[arg-type]
    file = tmp_path / "broken.yaml"
    file.write_text(case.text.replace("<model>", str(folder)), encoding="utf-8")
    missing = case.message.split("have no ")[1].split(";")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), ascend=True)
    problem = f"model_config.device_target = 'Ascend': the Ascend has no {missing}; use CPU, with op_table auto"
    assert problem in str(caught.value)


TLS = ("tls_cert=c", "tls_key=k")


@pytest.mark.parametrize(
    ("protection", "environment"),
    [
        (("allow_remote_unprotected=true",), ""),
        ((*TLS, "api_keys_file=keys"), ""),
        ((*TLS, "tls_client_ca=a"), ""),
        (TLS, "alice sha256:00"),
    ],
)
def test_allow_remote_permits_other_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protection: tuple[str, ...], environment: str
) -> None:
    monkeypatch.setenv("LLM_SERVING_API_KEYS", environment)
    folder = write_model_folder(tmp_path / "model")
    overrides = [f"serving_config.{each}" for each in ("server_ip=0.0.0.0", "allow_remote=true", *protection)]
    config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *overrides])
    assert config.serving_config.server_ip == "0.0.0.0"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_addresses(tmp_path: Path, address: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    overrides = [f"serving_config.{key}={address}" for key in ("server_ip", "agent_ip")]
    config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", *overrides])
    assert config.serving_config.server_ip == config.serving_config.agent_ip == address


def test_smallest_cache_of_a_sequence(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    config = load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", "pa_config.num_blocks=129"])
    assert config.max_model_len == 2048
    with pytest.raises(ConfigError, match="use at least 129 blocks"):
        load_config("llama_tiny_cpu.yaml", [f"model_config.model_path={folder}", "pa_config.num_blocks=128"])


def test_a_config_that_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(str(tmp_path))
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(str(tmp_path / "c.yaml"))


def test_alias_bomb_is_an_error_of_bounded_length(tmp_path: Path) -> None:
    lines = ["model_config: &a0 {seq_length: [1, 1, 1, 1, 1, 1, 1, 1]}"]
    lines += [f"b{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 9) + "]" for level in range(1, 25)]
    (tmp_path / "c.yaml").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "c.yaml"))
    assert len(str(caught.value)) < 2000


def test_parse_override() -> None:
    assert parse_override("pa_config.num_blocks=2048") == ("pa_config", "num_blocks", 2048)
    assert parse_override("model_config.seq_length=[1, 2]") == ("model_config", "seq_length", [1, 2])
    assert parse_override("model_config.model_path=/a=b c") == ("model_config", "model_path", "/a=b c")
    assert parse_override("tokenizer.vocab_file='null'") == ("tokenizer", "vocab_file", "null")
