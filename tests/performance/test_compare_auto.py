"""Tests the comparison with peers that installs them itself: ratios, table, picture, failures of a peer, and
environments.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from performance.peers.auto import environments, main, model_files
from performance.peers.auto.picture import draw, read_comparisons, write_picture
from performance.peers.auto.programs import FLOATS, PROGRAMS, Program, chosen_programs
from performance.peers.auto.results import Comparison, Span, comparisons, ratios_to_fastest, table
from performance.program import DisturbedError, LoadTestError

OURS = Program("ours int8", "int8", "ours")
SLOW, FAST = Program("slow", "int8", "llama_cpp"), Program("fast", "int8", "vllm", model="models/w8a8")
OTHER = Program("other", "bfloat16", "vllm")
REPOSITORY = Path(__file__).resolve().parents[2]
ROUNDS = [
    {
        "ours int8": {"batch 1": 30.0, "prefill 8": 9.0},
        "slow": {"batch 1": 10.0, "prefill 8": 9.0},
        "fast": {"batch 1": 20.0},
    },
    {"ours int8": {"batch 1": 30.0}, "slow": {"batch 1": 40.0}, "fast": {"batch 1": 20.0}, "other": {"batch 1": 99.0}},
    {"ours int8": {"batch 1": 30.0}},
]


def test_a_ratio_compares_runs_of_one_round_and_one_precision() -> None:
    assert ratios_to_fastest(ROUNDS, [OURS, SLOW, FAST, OTHER], OURS, "batch 1") == [1.5, 0.75]
    assert comparisons(ROUNDS, [OURS, SLOW, FAST, OTHER]) == {
        "int8": Comparison(
            {"batch 1": Span(0.75, 1.5, 2, ("slow", "fast")), "prefill 8": Span(1.0, 1.0, 1, ("slow",))}, (), 3
        )
    }


def test_a_round_without_the_fastest_peer_does_not_count() -> None:
    """In the second round, only the slow peer has a rate. A ratio of 3 to it would look too good, so the round does not
    count.
    """
    rounds = [{"ours int8": {"batch 1": 30.0}, "slow": {"batch 1": 10.0}, "fast": {"batch 1": 20.0}},
              {"ours int8": {"batch 1": 30.0}, "slow": {"batch 1": 10.0}}]  # fmt: skip
    assert ratios_to_fastest(rounds, [OURS, SLOW, FAST], OURS, "batch 1") == [1.5]
    assert comparisons(rounds, [OURS, SLOW, FAST])["int8"].spans["batch 1"] == Span(1.5, 1.5, 1, ("slow", "fast"))


def test_the_picture_names_the_peers_that_are_missing() -> None:
    gone = Program("gone", "int8", "openvino")
    rounds = [{"ours int8": {"batch 1": 30.0, "batch 8": 90.0}, "slow": {"batch 1": 10.0}, "fast": {"batch 1": 20.0}},
              {"ours int8": {"batch 1": 30.0, "batch 8": 90.0}, "fast": {"batch 8": 60.0}}]  # fmt: skip
    found = comparisons(rounds, [OURS, SLOW, FAST, gone, Program("ours bfloat16", "bfloat16", "ours"), OTHER])
    assert found["int8"].missing == ("gone",)
    assert found["bfloat16"] == Comparison({}, ("other",), 2)
    picture = draw(found)
    assert ">peers: slow, fast<" in picture
    assert ">not measured: gone<" in picture
    assert ">1.5 to 1.5; 1 of 2 rounds<" in picture
    assert ">1.5 to 1.5; without slow; 1 of 2 rounds<" in picture
    assert ">peers: none was measured<" in picture
    assert ">not measured: other<" in picture


def test_the_table_has_medians_and_ranges() -> None:
    lines = [" ".join(line.split()) for line in table(ROUNDS, [OURS, SLOW, FAST]).splitlines()]
    assert lines[1].split() == ["ours", "int8", "30.0", "9.00"]
    assert lines[3].split() == ["fast", "20.0", "-"]
    assert "ours int8 / slow 1.88 (0.75 to 3.00) 1.00 (1.00 to 1.00)" in lines
    assert any(line.startswith("ours int8 / the fastest") and "1.12 (0.75 to 1.50)" in line for line in lines)


def test_every_peer_is_compared_with_this_server_in_its_precision() -> None:
    assert [program.name for program in chosen_programs(("openvino",))] == ["ours int8", "OpenVINO int8"]
    llama_cpp = ["ours int8", "llama.cpp Q8_0", "ours int4", "llama.cpp Q4_1 (the file)"]
    assert [program.name for program in chosen_programs(("llama_cpp",))] == llama_cpp
    assert chosen_programs(("llama_cpp", "openvino", "vllm")) == list(PROGRAMS)


def test_the_axis_has_the_powers_of_two_around_all_bars() -> None:
    picture = draw({"int8": Comparison({"batch 1": Span(0.3, 17.0, 2, ("slow",))}, (), 2)})
    ticks = [f">{2.0**power:g}<" in picture for power in range(-3, 7)]
    assert ticks == [False, *[True] * 8, False], "0.25 to 32"
    bar = re.search(r'<rect x="(\d+)" y="\d+" width="(\d+)"', picture)
    assert bar is not None
    lines = [int(x) for x in re.findall(r'<path d="M(\d+) ', picture)]
    assert lines[0] < int(bar[1]) < lines[1], "0.3 is between 0.25 and 0.5"
    assert lines[-2] < int(bar[1]) + int(bar[2]) < lines[-1], "17 is between 16 and 32"


def test_the_picture_has_its_numbers_beside_it(tmp_path: Path) -> None:
    numbers = {"int8": Comparison({"prefill 1024": Span(0.8, 3.25, 2, ("slow", "fast"))}, ("gone",), 3)}
    write_picture(tmp_path / "peers.svg", numbers)
    assert "0.8 to 3.25" in (tmp_path / "peers.svg").read_text()
    assert ">prefill 1024<" in (tmp_path / "peers.svg").read_text()
    assert read_comparisons((tmp_path / "peers.json").read_text()) == numbers
    assert draw(numbers) == (tmp_path / "peers.svg").read_text()


def test_a_peer_that_fails_does_not_end_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def theirs(peer, parsed):
        order.append(peer.name)
        if peer.name == "vLLM W8A8":
            raise LoadTestError("vLLM W8A8: it ended with 1")
        return {"batch 1": 10.0}

    def ours(settings, parsed):
        order.append(next(setting for setting in settings if "weight_format" in setting))
        return {"batch 1": 20.0}

    def environment(folder, kind, isa):
        assert isa is None
        if kind == "openvino":
            raise LoadTestError("openvino: pip ended with 1: no network")
        return folder / kind

    monkeypatch.setattr(main, "find_gguf", lambda path: tmp_path / "model.gguf")
    monkeypatch.setattr(main, "environment_python", environment)
    monkeypatch.setattr(main, "model_path", lambda folder, name, file, python_of: file)
    monkeypatch.setattr(main, "measure_theirs", theirs)
    monkeypatch.setattr(main, "measure_ours", ours)
    kept = tmp_path / "result.json"
    options = ["--auto", "--config", "llama_tiny_cpu.yaml", "--folder", str(tmp_path), "--rounds", "2"]
    assert main.main([*options, "--json", str(kept), "--svg", str(tmp_path / "peers.svg")]) == 1
    assert ">not measured: OpenVINO int8, vLLM W8A8<" in (tmp_path / "peers.svg").read_text()
    text = capsys.readouterr()
    assert "no result, or not in all rounds: OpenVINO int8" in text.err
    assert "no result, or not in all rounds: vLLM W8A8" in text.err
    assert "ours int8 / llama.cpp Q8_0" in text.out
    assert len(order) == 2 * 7
    assert order[:7] != order[7:], "each round has another order"
    assert f"picture: {tmp_path / 'peers.svg'}\n" in text.out
    assert len(json.loads(kept.read_text())["rounds"]) == 2


def test_the_numbers_of_the_picture_never_replace_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (["--svg", str(tmp_path / "peers.svg")], ["--folder", str(tmp_path)]):
        assert main.main(["--auto", "--json", str(tmp_path / "peers.json"), *place]) == 2
        assert "choose another file for --json" in capsys.readouterr().err


def test_only_a_complete_run_replaces_the_picture_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``picture_paths`` returns the path without failures first, and the path with failures last."""
    assert main.PICTURE == REPOSITORY / "docs" / "pictures" / "peers.svg"
    of_folder = tmp_path / "peers.svg"
    monkeypatch.delenv("LLM_KERNELS_ISA", raising=False)

    def paths(*options: str) -> tuple[Path, ...]:
        return main.picture_paths(main.build_parser().parse_args(["--auto", "--folder", str(tmp_path), *options]))

    assert paths("--json", "results.json", "--timeout", "900") == (main.PICTURE, of_folder)
    for options in (("--peers", "vllm"), ("--batch", "1"), ("--rounds", "1"), ("--set", "model_config.seed=1")):
        assert paths(*options) == (of_folder,), options
    assert paths("--svg", "mine.svg") == (Path("mine.svg"),)
    with monkeypatch.context() as limited:
        limited.setenv("LLM_KERNELS_ISA", "avx2")
        assert paths() == (of_folder,), "only this server would be limited"
    monkeypatch.setattr(main, "PICTURE", tmp_path / "no" / "checkout" / "peers.svg")
    assert paths() == (of_folder,)


def test_a_disturbed_run_is_measured_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def theirs(peer, parsed):
        runs.append(peer.name)
        if len(runs) == 1:
            raise DisturbedError("a rate of -4 proves nothing")
        return {"batch 1": 10.0}

    monkeypatch.setattr(main, "find_gguf", lambda path: tmp_path / "model.gguf")
    monkeypatch.setattr(main, "environment_python", lambda folder, kind, isa: folder / kind)
    monkeypatch.setattr(main, "model_path", lambda folder, name, file, python_of: file)
    monkeypatch.setattr(main, "measure_theirs", theirs)
    monkeypatch.setattr(main, "measure_ours", lambda settings, parsed: {"batch 1": 20.0})
    options = ["--auto", "--config", "llama_tiny_cpu.yaml", "--folder", str(tmp_path), "--rounds", "1"]
    assert main.main([*options, "--peers", "openvino"]) == 0
    assert runs == ["OpenVINO int8", "OpenVINO int8"]
    assert (tmp_path / "peers.svg").exists()


def test_this_server_reads_the_model_of_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {}

    def ours(settings, parsed):
        found = dict(each.split("=", 1) for each in settings)
        models[found["model_config.weight_format"]] = Path(found["model_config.model_path"]).name
        return {"batch 1": 20.0}

    monkeypatch.setattr(main, "find_gguf", lambda path: tmp_path / "model.gguf")
    monkeypatch.setattr(main, "environment_python", lambda folder, kind, isa: folder / kind)
    monkeypatch.setattr(main, "model_path", lambda folder, name, file, python_of: folder / name if name else file)
    monkeypatch.setattr(main, "measure_theirs", lambda peer, parsed: {"batch 1": 10.0})
    monkeypatch.setattr(main, "measure_ours", ours)
    options = ["--auto", "--config", "llama_tiny_cpu.yaml", "--folder", str(tmp_path), "--rounds", "1"]
    assert main.main([*options, "--peers", "llama_cpp"]) == 0
    assert models == {"int8": "model.gguf", "int4": "floats.gguf"}


def test_an_interrupted_copy_of_the_model_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(file: Path, out: Path, *, num_layers: int | None, floats: bool) -> None:
        assert (num_layers, floats) == (None, True)
        out.write_bytes(file.read_bytes())
        if len(tries) == 1:
            raise KeyboardInterrupt

    file, tries = tmp_path / "model.gguf", []
    file.write_bytes(b"weights")
    monkeypatch.setattr(model_files, "copy_model", lambda *args, **options: tries.append(1) or copy(*args, **options))
    with pytest.raises(KeyboardInterrupt):
        model_files.model_path(tmp_path, FLOATS, file, lambda kind: tmp_path / kind)
    for _ in range(2):
        made = model_files.model_path(tmp_path, FLOATS, file, lambda kind: tmp_path / kind)
        assert made.read_bytes() == b"weights"
    assert len(tries) == 2


def test_a_model_of_the_file_itself_needs_no_conversion(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert model_files.model_path(tmp_path, "", file, lambda kind: tmp_path / "none") == file


def test_a_failed_conversion_shows_its_output(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no such tensor\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(LoadTestError, match=r"(?s)Q8_0.gguf could not be written; .* ended with 3:\nno such tensor"):
        model_files.model_path(tmp_path, "models/Q8_0.gguf", tmp_path / "model.gguf", lambda kind: script)


def test_an_environment_with_other_packages_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(environments.venv, "create", lambda place, with_pip: made.append(place) or _fake_python(place))
    monkeypatch.setitem(environments.PACKAGES, "vllm", ("one==1",))
    for _ in range(2):
        environments.environment_python(tmp_path, "vllm")
    assert len(made) == 1
    monkeypatch.setitem(environments.PACKAGES, "vllm", ("one==2",))
    environments.environment_python(tmp_path, "vllm")
    assert len(made) == 2
    monkeypatch.setitem(environments.PACKAGES, "vllm", ("fail",))
    with pytest.raises(LoadTestError, match="vllm: pip ended with 1: no such package"):
        environments.environment_python(tmp_path, "vllm")


def test_an_environment_that_was_built_with_other_variables_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(environments.venv, "create", lambda place, with_pip: made.append(place) or _fake_python(place))
    for flags in ("-O2", "-O2", "-O3"):
        monkeypatch.setitem(environments.BUILD, "llama_cpp", {"CMAKE_ARGS": flags})
        environments.environment_python(tmp_path, "llama_cpp")
    assert len(made) == 2
    monkeypatch.delitem(environments.BUILD, "llama_cpp")
    for _ in range(2):
        environments.environment_python(tmp_path, "llama_cpp")
    assert len(made) == 3


def _fake_python(place: Path) -> None:
    python = place / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *fail*) echo no such package; exit 1;; esac\n')
    python.chmod(0o755)
