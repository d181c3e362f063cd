"""Tests the limit of the comparison with peers to an instruction set: what each program gets, and the check of its
threads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from performance.peers import driver
from performance.peers.auto import environments, instruction_sets, main
from performance.peers.auto.instruction_sets import (
    LIMITS,
    environment_variables,
    limited_environment,
    reason_left_out,
)
from performance.peers.auto.picture import draw
from performance.peers.auto.programs import KINDS, Program
from performance.peers.auto.results import Comparison, Span, table
from performance.peers.compare import Peer, measure_peer
from performance.program import LoadTestError

PROCESSOR = Path("/proc/cpuinfo").read_text(encoding="utf-8")
HIDES = "cpuid_fault" in PROCESSOR and "avx512f" in PROCESSOR and shutil.which("cc") is not None
FEATURES = """
import json
from numpy.core._multiarray_umath import __cpu_features__ as features
print(json.dumps({name: features[name] for name in ("AVX2", "FMA3", "AVX512F", "AVX512_SKX")}))
"""
REPLACE_HANDLER = f"""
import ctypes, faulthandler
faulthandler.enable()
ctypes.CDLL(None).signal({int(signal.SIGSEGV)}, None)
"""
"""Replaces the handler of the signal with the two functions of the C library, as programs do that print a traceback."""
DRIVER = """
import os, sys
import driver

def make_generate(request):
    print({name: os.environ.get(name) for name in ("PEER_TEST", "OMP_NUM_THREADS")})
    return lambda prompts, new: None

driver.main(make_generate)
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a file that replaces /proc/cpuinfo. It describes a processor that can hide instructions."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 cpuid_fault\n")
    monkeypatch.setattr(instruction_sets, "CPUINFO", file)
    return file


@pytest.mark.parametrize("isa", LIMITS)
def test_every_program_has_a_limit(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "_library", lambda folder: folder / "library.so")
    for kind in KINDS:
        variables = limited_environment(isa, kind, tmp_path)
        assert variables[driver.FORBIDS_AVX512] == "1", "the driver checks the limit"
        assert ("LD_PRELOAD" in variables) == (kind in LIMITS[isa].hidden)
        assert limited_environment(None, kind, tmp_path) == {}
    assert limited_environment(isa, "ours", tmp_path)["LLM_KERNELS_ISA"] == isa
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        assert limited_environment(isa, "vllm", tmp_path)[name].startswith(f"{tmp_path}/vllm_{isa}_cache")


def test_a_peer_is_built_for_the_instruction_set_in_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's cache may have the package of the other environment, so pip must not use it."""
    commands = tmp_path / "commands"

    def create(place: Path, with_pip: bool) -> None:
        python = place / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "$0 $* $CMAKE_ARGS" >> {commands}\n')
        python.chmod(0o755)

    monkeypatch.setattr(environments.venv, "create", create)
    plain, limited = (environments.environment_python(tmp_path, "llama_cpp", isa) for isa in (None, "avx2"))
    assert [each.parents[1].name for each in (plain, limited)] == ["llama_cpp", "llama_cpp_avx2"]
    assert environments.environment_python(tmp_path, "openvino", "avx2").parents[1].name == "openvino"
    installs = [line for line in commands.read_text().splitlines() if " install " in line]
    assert len(installs) == 3
    assert "mno-amx" in installs[0]
    assert "-DGGML_NATIVE=OFF -DGGML_AVX2=ON" in installs[1]
    assert ["--no-cache-dir" in line for line in installs] == [True, True, False]
    assert (tmp_path / "llama_cpp_avx2-pip.log").is_file()


@pytest.mark.parametrize(
    ("flags", "compiler", "reason"),
    [("avx2 cpuid_fault", "sh", None), ("avx2", "sh", "without cpuid_fault"), ("cpuid_fault", "/none", "C compiler")],
)
def test_a_peer_that_cannot_be_limited_has_a_reason(
    flags: str, compiler: str, reason: str | None, cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo.write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setenv("CC", compiler)
    found = reason_left_out("avx2", "vllm")
    assert found is reason is None or (reason is not None and found is not None and reason in found)
    assert reason_left_out("avx2", "openvino") is None
    assert reason_left_out(None, "vllm") is None


def test_the_variables_of_this_server_end_with_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_KERNELS_ISA", "portable")
    monkeypatch.delenv("PEER_TEST", raising=False)
    with environment_variables({"LLM_KERNELS_ISA": "avx2", "PEER_TEST": "1"}):
        assert (os.environ["LLM_KERNELS_ISA"], os.environ["PEER_TEST"]) == ("avx2", "1")
    assert os.environ["LLM_KERNELS_ISA"] == "portable"
    assert "PEER_TEST" not in os.environ


def test_a_limited_comparison_names_the_instruction_set(
    tmp_path: Path, cpuinfo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpuinfo.write_text("flags\t\t: avx2\n")
    monkeypatch.delenv("LLM_KERNELS_ISA", raising=False)
    limits = {}

    def theirs(peer, parsed):
        limits[peer.name] = (Path(peer.python).name, peer.environment)
        return {"batch 1": 10.0}

    def ours(settings, parsed):
        assert os.environ["LLM_KERNELS_ISA"] == "avx2"
        return {"batch 1": 20.0}

    monkeypatch.setattr(main, "find_gguf", lambda path: tmp_path / "model.gguf")
    monkeypatch.setattr(main, "environment_python", lambda folder, kind, isa: folder / f"{kind}_{isa}")
    monkeypatch.setattr(main, "model_path", lambda folder, name, file, python_of: file)
    monkeypatch.setattr(main, "measure_theirs", theirs)
    monkeypatch.setattr(main, "measure_ours", ours)
    kept = tmp_path / "result.json"
    options = ["--auto", "--config", "llama_tiny_cpu.yaml", "--folder", str(tmp_path), "--rounds", "1"]
    assert main.main([*options, "--isa", "avx2", "--json", str(kept)]) == 0
    assert limits["OpenVINO int8"][0] == "openvino_avx2"
    assert limits["OpenVINO int8"][1]["OV_CPU_MAX_ISA"] == limits["OpenVINO int8"][1]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert set(limits) == {"OpenVINO int8", "llama.cpp Q8_0", "llama.cpp Q4_1 (the file)"}
    assert "LLM_KERNELS_ISA" not in os.environ
    result, text = json.loads(kept.read_text()), capsys.readouterr()
    assert result["isa"] == "avx2"
    assert "without cpuid_fault" in result["left_out"]["vllm"]
    assert "left out: vllm: " in text.err
    assert "tokens/s with avx2 (median)" in text.out
    assert f"picture: {tmp_path / 'peers_avx2.svg'}\n" in text.out
    assert ">not measured: vLLM W8A8<" in (tmp_path / "peers_avx2.svg").read_text()
    assert main.main([*options, "--isa", "avx2", "--peers", "vllm"]) == 2
    assert "--isa avx2: no peer can be limited to it here" in capsys.readouterr().err


def test_a_limited_comparison_never_replaces_the_picture_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "_compare", lambda _: pytest.fail("the programs are measured"))
    parsed = main.build_parser().parse_args(["--auto", "--isa", "avx2", "--folder", str(tmp_path)])
    assert main.picture_paths(parsed) == (tmp_path / "peers_avx2.svg",)
    for name in ("peers.svg", "peers.txt"):  # the numbers of both are in peers.json
        assert main.main(["--auto", "--isa", "avx2", "--svg", str(main.PICTURE.with_name(name))]) == 2
        assert "choose another file for --svg" in capsys.readouterr().err


def test_the_tables_and_the_picture_name_the_instruction_set() -> None:
    programs = [Program("ours int8", "int8", "ours"), Program("peer", "int8", "openvino")]
    rounds = [{"ours int8": {"batch 1": 30.0}, "peer": {"batch 1": 20.0}}]
    assert "tokens/s with avx2 (median)" in table(rounds, programs, "avx2")
    assert "ratio with avx2 (smallest to largest)" in table(rounds, programs, "avx2")
    assert "with" not in table(rounds, programs)
    numbers = {"int8": Comparison({"batch 1": Span(1.5, 1.5, 1, ("peer",))}, (), 1)}
    assert "fastest peer (all with avx2); bars span all rounds" in draw(numbers, "avx2")
    assert "avx2" not in draw(numbers)


def test_a_peer_gets_its_own_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm_driver.py").write_text(DRIVER.replace("return lambda", "sys.exit(3)\n    return lambda"))
    (tmp_path / "driver.py").write_text(Path(driver.__file__).read_text())
    monkeypatch.setattr("performance.peers.compare.FOLDER", tmp_path)
    peer = Peer("fake", "vllm", sys.executable, "/no/model", {"PEER_TEST": "set", "OMP_NUM_THREADS": "7"})
    parsed = main.build_parser().parse_args(["--batch", "1", "--new", "2"])
    parsed.__dict__.update(no_prefill=True, repeats=1, vocab_size=100, lock=None)
    _, error = measure_peer(peer, parsed)
    assert error is not None
    assert "{'PEER_TEST': 'set', 'OMP_NUM_THREADS': '7'}" in error


@pytest.mark.parametrize(
    ("threads", "fails"),
    [
        ({"1": "", "2": ""}, False),  # the processor has no AVX-512
        ({"1": "AVX512_elapsed_ms:\t-1\n"}, False),
        ({"1": "AVX512_elapsed_ms:\t9000\n"}, False),  # before the run
        ({"1": "AVX512_elapsed_ms:\t-1\n", "2": "AVX512_elapsed_ms:\t40\n"}, True),
    ],
)
def test_a_driver_fails_if_a_thread_uses_avx512(
    threads: dict[str, str], fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in threads.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "arch_status").write_text(text)
    monkeypatch.setattr(driver, "TASKS", tmp_path)
    if not fails:
        driver._check_avx512(5.0)
        return
    with pytest.raises(SystemExit, match="a thread used AVX-512 40 ms ago"):
        driver._check_avx512(5.0)


def test_a_kernel_that_reports_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TASKS", tmp_path)
    with pytest.raises(SystemExit, match="the limit cannot be checked"):
        driver._check_avx512(5.0)


@pytest.mark.parametrize("limited", [False, True])
def test_a_driver_checks_only_a_limited_run(
    limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EndedError(Exception):
        pass

    def end(code: int) -> None:
        raise EndedError

    monkeypatch.setattr(driver, "TASKS", tmp_path)
    monkeypatch.setattr(driver, "_seconds", lambda generate, prompts, new: float(new))
    monkeypatch.setattr(driver.os, "_exit", end)
    monkeypatch.delenv(driver.FORBIDS_AVX512, raising=False)
    if limited:
        monkeypatch.setenv(driver.FORBIDS_AVX512, "1")
    request = {"batch": [1], "prompt": 4, "new": 2, "prefill": [], "repeats": 1, "vocab_size": 100, "lock": None}
    monkeypatch.setattr(sys, "argv", ["driver", json.dumps(request)])
    with pytest.raises(SystemExit if limited else EndedError):
        driver.main(lambda request: lambda prompts, new: None)
    assert (driver.MARK in capsys.readouterr().out) is not limited


@pytest.mark.skipif(not HIDES, reason="needs cpuid_fault, AVX-512 and a C compiler")
def test_the_library_hides_newer_instructions_from_a_program_and_its_children(tmp_path: Path) -> None:
    environment = {**os.environ, **limited_environment("avx2", "vllm", tmp_path)}
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FEATURES!r}], check=True)"
    seen = {}
    for name, variables, code in (
        ("all", dict(os.environ), FEATURES),
        ("limited", environment, f"{REPLACE_HANDLER}{FEATURES}"),
        ("child", environment, start),
    ):
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        seen[name] = json.loads(done.stdout)
    assert seen["all"]["AVX512F"]
    assert seen["limited"] == seen["child"] == {"AVX2": True, "FMA3": True, "AVX512F": False, "AVX512_SKX": False}


@pytest.mark.skipif(not HIDES, reason="needs cpuid_fault, AVX-512 and a C compiler")
def test_another_fault_ends_the_program_as_before(tmp_path: Path) -> None:
    environment = {**os.environ, **limited_environment("avx2", "vllm", tmp_path)}
    crash = [sys.executable, "-c", "import ctypes; ctypes.string_at(0)"]
    assert subprocess.run(crash, env=environment, capture_output=True, timeout=60, check=False).returncode == -11


def test_a_library_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no headers\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(LoadTestError, match=r"(?s)hide_avx512.c could not be compiled; .* ended with 4:\nno headers"):
        limited_environment("avx2", "vllm", tmp_path)
