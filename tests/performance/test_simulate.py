"""Tests the simulator as a program: its table, its JSON and its errors."""

import json
from pathlib import Path

import pytest

from performance.simulation.main import main

PUBLISHED = ["--config", "llama_7b_kbk_pa_dyn.yaml", "--device", "ascend-910b"]
SHORT = ["-X", "4", "-T", "5", "--output-len", "4:20"]
LOAD_TEST_KEYS = {
    "requests", "failed", "total_time_s", "output_tokens_per_s", "qps", "ttft_ms", "tbt_ms", "tpot_ms", "e2e_s",
    "normalized_latency_ms", "goodput",
}  # fmt: skip


def test_policies_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert main([*PUBLISHED, *SHORT, "--policy", "prefill_first,fcfs", "--seed", "3", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert list(content["policies"]) == ["prefill_first", "fcfs"]
    for figures in content["policies"].values():
        assert set(figures) >= LOAD_TEST_KEYS | {"preemptions", "kv_waste", "per_request"}
        assert (figures["requests"], figures["failed"]) == (20, 0)
        assert figures["options"]["seed"] == 3
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["prefill_first", "fcfs"]


def test_one_run_prints_the_report_of_a_load_test(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*PUBLISHED, *SHORT, "--plots", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "All Tasks Done; Exec Time is " in out
    assert "time to first token (ms)" in out
    [picture] = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_two_runs_have_exactly_the_same_result(tmp_path: Path) -> None:
    results = []
    for name in ("a", "b"):
        path = tmp_path / name
        main([*PUBLISHED, *SHORT, "--policy", "fcfs", "--json", str(path)])
        [result] = json.loads(path.read_text())["policies"].values()
        del result["simulation_cpu_s"]
        results.append(result)
    assert results[0] == results[1]


def test_a_sweep_runs_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    sweeps = ["--sweep", "pa_config.num_blocks=257,300", "--sweep", "rate=2,4", "--policy", "fcfs"]
    assert main([*PUBLISHED, *SHORT, *sweeps, "--json", str(path)]) == 0
    runs = json.loads(path.read_text())["policies"]
    assert {name: run["requests"] for name, run in runs.items()} == {
        "fcfs num_blocks=257 rate=2": 10,
        "fcfs num_blocks=257 rate=4": 20,
        "fcfs num_blocks=300 rate=2": 10,
        "fcfs num_blocks=300 rate=4": 20,
    }
    assert all("per_request" not in run for run in runs.values())


def test_a_faster_device_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    main([*PUBLISHED, *SHORT, "--sweep", "device.memory_bytes_per_s=1e11,1e12", "--json", str(path)])
    slow, fast = json.loads(path.read_text())["policies"].values()
    assert slow["tbt_ms"]["p50"] > 5 * fast["tbt_ms"]["p50"]


def test_the_found_rate_meets_the_objectives_and_a_higher_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rate.json"
    objectives = ["--slo-ttft-ms", "500", "--slo-tbt-ms", "40"]
    assert main([*PUBLISHED, "-T", "10", "--find-rate", *objectives, "--policy", "fcfs", "--json", str(path)]) == 0
    [found] = json.loads(path.read_text())["rates"].values()
    assert found["rate"] < found["above"] <= 1.02 * found["rate"] * 1.001
    assert found["run"]["ttft_ms"]["p99"] <= 500
    assert found["run"]["tbt_ms"]["p99"] <= 40
    assert f"fcfs: {found['rate']:.3g} requests/s meet the objectives" in capsys.readouterr().out


def test_no_rate_meets_an_objective_shorter_than_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PUBLISHED, "-T", "100", "--output-len", "2:4", "--find-rate", "--slo-ttft-ms", "1"]) == 2
    assert "no rate meets the objectives" in capsys.readouterr().err


def test_a_trace_is_simulated_unchanged(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_text(
        '{"arrival_s": 7.5, "prompt": [11, 12, 13], "output_tokens": 3, "max_tokens": 9}\n\n'
        '{"arrival_s": 5.0, "prompt_tokens": 40, "output_tokens": 5}\n'
    )
    assert main([*PUBLISHED, "--trace", str(trace), "--policy", "fcfs", "--json", str(path)]) == 0
    first, second = json.loads(path.read_text())["policies"]["fcfs"]["per_request"]
    assert (first["due_s"], first["prompt_tokens"], first["output_tokens"], first["finish_reason"]) == (
        0.0, 40, 5, "length",
    )  # fmt: skip
    assert (second["due_s"], second["prompt_tokens"], second["output_tokens"], second["finish_reason"]) == (
        2.5, 3, 3, "stop",
    )  # fmt: skip


def test_a_simulation_validated_against_itself_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, load_test, result = tmp_path / "run.json", tmp_path / "load.json", tmp_path / "result.json"
    arguments = ["--config", "llama_160m_cpu.yaml"]
    assert main([*arguments, *SHORT, "--policy", "fcfs", "--json", str(run)]) == 0
    load_test.write_text(json.dumps(json.loads(run.read_text())["policies"]["fcfs"]))
    validate = ["--policy", "fcfs,prefill_first", "--validate", str(load_test), "--json", str(result)]
    assert main([*arguments, *validate]) == 0
    rows = json.loads(result.read_text())["policies"]["fcfs"]
    assert rows["TTFT ms p50"]["measured"] > 0
    assert [row["error"] for row in rows.values()] == pytest.approx([0.0] * len(rows), abs=1e-5)
    assert f"{len(rows)} of {len(rows)} figures within 10 %" in capsys.readouterr().out


def test_text_prompts_are_tokenised(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--config", "llama_tiny_cpu.yaml", *SHORT, "--text-prompts", "--prompt-len", "8:9"]
    assert main([*arguments, "--policy", "fcfs", "--json", str(path)]) == 0
    lengths = [one["prompt_tokens"] for one in json.loads(path.read_text())["policies"]["fcfs"]["per_request"]]
    assert min(lengths) >= 8
    assert len(set(lengths)) > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.yaml"], "no such config file"),
        ([*PUBLISHED, "-X", "0.01", "-T", "1"], "makes no request"),
        ([*PUBLISHED, "--policy", "luck"], "scheduler_config.policy"),
        ([*PUBLISHED, "--recording", "f"], "--recording fits a device to measured steps"),
        ([*PUBLISHED, "--set", "device.speed=3"], "device.speed: there is no such field; the fields are"),
        ([*PUBLISHED, "--set", "host.send_s=soon"], "host.send_s: 'soon' is not a number"),
        ([*PUBLISHED, "--sweep", "rate=fast"], "--sweep rate: 'fast' is not a number above 0"),
        ([*PUBLISHED, "--trace", "/no/such"], "cannot read /no/such"),
        ([*PUBLISHED, "--save-fit", "f"], "there is no fit to save"),
        ([*PUBLISHED, "--validate", "/no/such"], "cannot read /no/such"),
        ([*PUBLISHED, *SHORT, "--text-prompts"], "text prompts need the model's tokenizer"),
    ],
)
def test_wrong_options_are_exit_code_2_of_the_simulator(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_error_names_the_wrong_line_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    for line, message in (
        ('{"arrival_s": 1, "output_tokens": 2}', ":2: give either 'prompt'"),
        ('{"arrival_s": 1, "prompt_tokens": 2}', ":2: Object missing required field `output_tokens`"),
        ('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 0}', ":2: a request needs at least 1 prompt token"),
        ('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 1, "x": 1}', ":2: Object contains unknown field `x`"),
    ):
        trace.write_text('{"arrival_s": 0, "prompt_tokens": 2, "output_tokens": 2}\n' + line)
        assert main([*PUBLISHED, "--trace", str(trace)]) == 2
        assert f"{trace}{message}" in capsys.readouterr().err


def test_requests_with_a_common_prefix_go_to_the_same_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    sets = ["scheduler_config.prefix_cache=true", "parallel_config.data_parallel=4", "pa_config.num_blocks=2048"]
    arguments = [*PUBLISHED, "-X", "20", "-T", "10", "--output-len", "16:32", "--beginnings", "64x500"]
    arguments += [part for one in sets for part in ("--set", one)]
    sweep = ["--sweep", "parallel_config.routing=prefix,least_loaded,round_robin"]
    assert main([*arguments, *sweep, "--json", str(path)]) == 0
    runs = json.loads(path.read_text())["policies"]
    found = {name.removeprefix("routing="): run["prefix_hit_share"] for name, run in runs.items()}
    assert found["prefix"] > 1.3 * found["least_loaded"]
    assert found["prefix"] > 1.3 * found["round_robin"]
    for run in runs.values():
        assert (run["requests"], run["failed"]) == (200, 0)
        assert sum(sum(placed.values()) for placed in run["replicas"]) == 200
        assert all(placed for placed in run["replicas"])
    assert main([*arguments]) == 0
    assert "replica 3: " in capsys.readouterr().out


def test_beginnings_apply_only_to_generated_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*PUBLISHED, "--trace", str(tmp_path / "x.jsonl"), "--beginnings", "4x100"]) == 2
    assert "--beginnings" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*PUBLISHED, *SHORT, "--beginnings", "4"])
