"""Tests that a fit to a flight recording finds the parameters of the simulated device."""

from dataclasses import astuple, replace
from pathlib import Path

import pytest

from llm_serving.config import load_config
from llm_serving.flight.reader import Stretch, read_recording
from llm_serving.flight.setup import record
from llm_serving.scheduler.output import ScheduledStep, StepKind
from performance.load.options import LoadOptions
from performance.program import UsageError, write_json
from performance.simulation import recording, setup
from performance.simulation.device import RooflineDevice
from performance.simulation.fit import FittedDevice
from performance.simulation.host import HostModel
from performance.simulation.main import main
from performance.simulation.recording import (
    TimedStep,
    fit_recording,
    of_recording,
    slowdown_within,
    timed_steps,
    with_delivery,
)
from performance.simulation.runs import NOWHERE
from performance.simulation.server import VirtualServer
from performance.simulation.slowdown import Slowdown
from performance.simulation.spread import Spread
from performance.simulation.work import work_of
from performance.simulation.workload import OpenLoop, SimulatedRequest
from support.performance_simulated import NO_TIME, ask, limits

CONFIG = load_config("llama_tiny_cpu.yaml", ascend=False)
STEP_S, TOKEN_S, KEY_S = 5e-3, 1e-3, 1e-4


class LinearDevice:
    """A device whose step takes 5 ms, plus 1 ms for each token and 0.1 ms for each key."""

    name = "linear"

    def seconds(self, step: ScheduledStep) -> float:
        work = work_of(step)
        return STEP_S + TOKEN_S * work.tokens + KEY_S * work.context


def recorded(
    folder: Path,
    requests: list[SimulatedRequest],
    arrivals: list[float],
    host: HostModel = NO_TIME,
    spread: Spread | None = None,
) -> None:
    """Records a simulated run with a flight recorder, and returns the recording."""
    server = VirtualServer(limits(), LinearDevice(), OpenLoop(requests, arrivals), host, spread)
    errors: list[str] = []
    recorder = server.put_before(lambda scheduler: record(scheduler, folder, 1 << 20, on_error=errors.append))
    server.run()
    recorder.close()
    assert errors == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    requests = [ask(prompt, output) for prompt in (3, 9, 30) for output in (5, 17, 30)] * 3
    recorded(tmp_path / "flight", requests, [0.2 * index for index in range(len(requests))])
    return tmp_path / "flight"


def test_the_fit_finds_the_time_to_accept_a_request(tmp_path: Path) -> None:
    host = replace(NO_TIME, accept_s=0.002, from_agent_s=0.0005)
    recorded(tmp_path / "flight", [ask(3, 9)] * 9, [0.2 * index for index in range(9)], host)
    fit = fit_recording(tmp_path / "flight", CONFIG)
    assert fit.host.accept_s == pytest.approx(0.002, abs=1e-5)
    # A recording shows only the sum of the two transfer times, here 0.5 ms. The fit gives each transfer half of the
    # sum.
    assert fit.host.deliver_s == fit.host.from_agent_s == pytest.approx(0.00025, abs=3e-5)


def test_the_fit_of_a_recording_finds_the_delay_by_arriving_requests(tmp_path: Path) -> None:
    host = replace(NO_TIME, interrupt_s=0.002)
    requests = [ask(3 + index % 7, 25) for index in range(30)]
    recorded(tmp_path / "flight", requests, [0.053 * index for index in range(30)], host)
    fit = fit_recording(tmp_path / "flight", CONFIG)
    assert fit.host.interrupt_s == pytest.approx(0.002, rel=0.15)
    recorded(tmp_path / "without", requests, [0.053 * index for index in range(30)])
    assert fit_recording(tmp_path / "without", CONFIG).host.interrupt_s < 1e-4


def test_the_transfer_time_is_the_mean_and_not_the_median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "flight", [ask(3, 9)] * 9, [0.2 * index for index in range(9)])
    timed = recording.timed_steps

    def some_late(stretch: Stretch) -> list[TimedStep]:
        """Returns timed steps in which every fourth result is late by 4 ms, as from a busy processor core."""
        return [
            replace(each, completed_at=each.completed_at + 0.004 * (index % 4 == 0))
            for index, each in enumerate(timed(stretch))
        ]

    monkeypatch.setattr(recording, "timed_steps", some_late)
    fit = fit_recording(tmp_path / "flight", CONFIG)
    assert fit.host.to_agent_s == fit.host.from_agent_s == pytest.approx(0.0005, rel=0.1)


def test_the_delivery_time_comes_from_clients_and_recording(tmp_path: Path) -> None:
    host = replace(NO_TIME, deliver_s=0.004, deliver_piece_s=0.0)
    server = VirtualServer(limits(), LinearDevice(), OpenLoop([ask(3, 9)] * 9, [0.2 * i for i in range(9)]), host)
    recorder = server.put_before(lambda scheduler: record(scheduler, tmp_path / "flight", 1 << 20, on_error=print))
    outcome = server.run()
    recorder.close()
    fit = fit_recording(tmp_path / "flight", CONFIG)
    assert fit.host.deliver_s != pytest.approx(0.004, abs=1e-3)
    delivered = with_delivery(fit, tmp_path / "flight", outcome.records)
    assert delivered.host.deliver_s == pytest.approx(0.004 - fit.host.result_s, abs=1e-6)
    assert replace(delivered, host=fit.host) == fit
    with pytest.raises(UsageError, match="none of the clients' requests"):
        with_delivery(fit, tmp_path / "flight", [])


def test_recorded_steps_have_their_work_and_their_time(folder: Path) -> None:
    [stretch] = read_recording(folder)
    timed = timed_steps(stretch)
    first = timed[0]
    assert (first.step.kind, first.step.query_lens, first.scheduled, first.queue_s) == (StepKind.PREFILL, [3], 0.0, 0.0)
    assert first.run_s == pytest.approx(STEP_S + 3 * TOKEN_S + 3 * KEY_S, abs=1e-6)
    assert first.completed_at == pytest.approx(first.run_s, abs=1e-6)
    assert sorted(each.step.seq for each in timed) == list(range(len(timed)))
    assert [each.completed_at for each in timed] == sorted(each.completed_at for each in timed)


def test_the_fit_of_a_recording_finds_the_device(folder: Path) -> None:
    fit = fit_recording(folder, CONFIG)
    device, truth = FittedDevice(fit), LinearDevice()
    [stretch] = read_recording(folder)
    for each in timed_steps(stretch):
        step = ScheduledStep(
            0, each.step.kind, rows=each.step.rows, query_lens=each.step.query_lens, starts=each.step.starts,
            do_sample=each.step.do_sample,
        )  # fmt: skip
        assert device.seconds(step) == pytest.approx(truth.seconds(step), rel=0.01)
    assert fit.provenance["agents_share_us"] < 2
    assert fit.provenance["policies"] == ["prefill_first"]
    assert (fit.host.to_agent_s, fit.host.from_agent_s) == pytest.approx((0.0, 0.0), abs=2e-6)


def test_the_machines_speed_comes_from_the_steps_in_a_span(folder: Path, tmp_path: Path) -> None:
    fit = fit_recording(folder, CONFIG)
    assert astuple(slowdown_within(fit, folder, [(0.0, 100.0)])) == pytest.approx((1.0, 1.0, 1.0, 1.0), abs=0.01)
    recorded(tmp_path / "later", [ask(9, 30)] * 20, [0.2 * index for index in range(20)])
    twice = slowdown_within(fit.slowed(Slowdown(0.5, 0.5, 0.5, 0.5)), tmp_path / "later", [(1.0, 2.0), (3.0, 4.0)])
    assert astuple(twice) == pytest.approx((2.0, 2.0, 2.0, 2.0), rel=0.02)
    with pytest.raises(UsageError, match="0 steps"):
        slowdown_within(fit, tmp_path / "later", [(50.0, 60.0)])


@pytest.mark.parametrize(("share", "seconds"), [(0.7, 0.4), (0.0, 0.0)])
def test_the_fit_finds_how_long_slow_periods_last(tmp_path: Path, share: float, seconds: float) -> None:
    spread = Spread([0.9 + 0.02 * place for place in range(11)], share, seconds)
    recorded(tmp_path / "noisy", [ask(5, 30)] * 300, [0.3 * index for index in range(300)], spread=spread)
    found = fit_recording(tmp_path / "noisy", CONFIG).spread
    assert found.lasting_share == pytest.approx(share, abs=0.1)
    if share:
        assert found.lasting_s == pytest.approx(seconds, rel=0.3)


def test_only_steps_within_the_repeated_loads_are_fitted(folder: Path) -> None:
    """Only steps within the spans of time in ``spans`` are fitted. Each span is one repetition of a load.

    Other tests cover how the times of repeated loads are scaled.
    """
    whole = fit_recording(folder, CONFIG)
    spans = [(0.0, 1.5), (1.5, 3.0), (3.0, 4.5)]
    fit = fit_recording(folder, CONFIG, [spans])
    assert fit.provenance["steps"] < whole.provenance["steps"]
    assert slowdown_within(fit, folder, spans).steps == pytest.approx(1.0, abs=0.01)
    with pytest.raises(UsageError, match="0 steps"):
        fit_recording(folder, CONFIG, [[(50.0, 60.0)]])


def test_a_recording_can_be_simulated_again(folder: Path) -> None:
    options = LoadOptions(NOWHERE)
    again = of_recording(folder, options)
    assert [(len(each.prompt_token_ids), each.output_tokens) for each in again.requests[:3]] == [
        (3, 5),
        (3, 17),
        (3, 30),
    ]
    assert list(again.times) == pytest.approx([0.2 * index for index in range(27)])


def test_the_program_fits_saves_and_reuses_a_fit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, result = tmp_path / "fit.json", tmp_path / "result.json"
    arguments = ["--config", "llama_tiny_cpu.yaml", "--policy", "fcfs", "--trace", str(folder)]
    assert main([*arguments, "--recording", str(folder), "--save-fit", str(fit), "--json", str(result)]) == 0
    first = result.read_text()
    assert '"requests": 27' in first
    assert main([*arguments, "--fit", str(fit), "--json", str(result)]) == 0
    assert "cpu fitted" in capsys.readouterr().out
    other = ["--config", "llama_160m_cpu.yaml", "--fit", str(fit)]
    assert main(other) == 2
    assert "the fit is for model 'llama_tiny', the configuration has 'llama_160m'" in capsys.readouterr().err
    assert main([*arguments, "--fit", str(fit), "--set", "device.memory_bytes_per_s=1e9"]) == 2
    assert "the device is fitted to measured steps and has no rates" in capsys.readouterr().err


def test_a_stored_fit_is_used_for_its_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "STORED_FITS", tmp_path)
    assert isinstance(setup.make_setup("llama_tiny_cpu.yaml", [], "cpu").device, RooflineDevice)
    write_json(setup.stored_fit(CONFIG), fit_recording(folder, CONFIG).as_json())
    taken = setup.make_setup("llama_tiny_cpu.yaml", [], "cpu")
    assert isinstance(taken.device, FittedDevice)
    assert taken.spread is not None
    rates = ["device.memory_bytes_per_s=1e9"]
    assert isinstance(setup.make_setup("llama_tiny_cpu.yaml", rates, "cpu").device, RooflineDevice)
    assert isinstance(setup.make_setup("llama_160m_cpu.yaml", [], "cpu").device, RooflineDevice)
    assert isinstance(setup.make_setup("llama_160m_cpu.yaml", [], "ascend-910b").device, RooflineDevice)


def test_a_recording_without_a_completed_request_is_rejected(tmp_path: Path) -> None:
    recorded(tmp_path / "empty", [SimulatedRequest((1,) * 60, 4)], [0.0])
    with pytest.raises(UsageError, match=r"no request of .* completed"):
        of_recording(tmp_path / "empty", LoadOptions(NOWHERE))


def test_a_file_that_is_not_a_recording_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "llama_tiny_cpu.yaml", "--recording", str(tmp_path)]) == 2
    assert "no flight recording" in capsys.readouterr().err
