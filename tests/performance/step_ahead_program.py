"""Runs decode steps with a temperature on a held device, and prints the events of host and device as JSON.

test_bench_step_ahead.py starts it in a separate process. The weights are written to the working directory.
"""

from __future__ import annotations

import json
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from agent.backends.runtime import start_runtime  # noqa: E402
from performance.artificial_device.queue import ArtificialDevice, QueuedLaunch, Run  # noqa: E402
from performance.bench.step_ahead_main import (  # noqa: E402
    SAMPLING_GRAPHS,
    Measured,
    events_of,
    note_launches,
    run_steps,
    started_runner,
)
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import VARIANTS  # noqa: E402
from support.agent_group import with_layers  # noqa: E402
from support.step_config import make_config  # noqa: E402
from support.time_limits import time_limit  # noqa: E402

MODEL = "llama3_rope"
STEPS, HELD = 12, 8
"""Number of steps, and the number of first launches of steps that the device holds."""
LAUNCHES = 1 + SAMPLING_GRAPHS
"""Number of launches of a step."""
WAIT_S = time_limit(20)


class HeldDevice(ArtificialDevice):
    """Runs each launch of a step only after the host has made the same launch of the next step.

    If the host waits for the result of a step before it launches the next one, this device would wait forever. After
    ``WAIT_S`` seconds it stops to hold launches, and ``waited_in_vain`` is True.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = threading.Condition()
        self._num_launched = self._num_held = 0
        self.waited_in_vain = False

    def hold(self, num_launches: int) -> None:
        """Holds the next ``num_launches`` launches."""
        with self._changed:
            self._num_launched, self._num_held = 0, num_launches

    def launch(self, run: Run, fetched: slice) -> QueuedLaunch:
        if self._graph == "rows":  # the host waits for these logits before it launches the next step
            return super().launch(run, fetched)
        number = self._num_launched

        def held() -> Any:
            self._wait_for(number + LAUNCHES)
            return run()

        launch = super().launch(held if number < self._num_held else run, fetched)
        with self._changed:
            self._num_launched += 1
            self._changed.notify_all()
        return launch

    def _wait_for(self, number: int) -> None:
        with self._changed:
            is_launched = self._changed.wait_for(
                lambda: self._num_launched > number or self.waited_in_vain, timeout=WAIT_S
            )
            self.waited_in_vain |= not is_launched


def measure(wrong_every: int) -> dict[str, Any]:
    """Runs the steps. Every launch of draws whose number is a multiple of ``wrong_every`` is wrong; 0 means none."""
    measured = Measured(periods=device.periods)
    device.periods.clear()
    device.are_wrong.clear()
    device.wrong_every = wrong_every
    device.hold(HELD * LAUNCHES)
    launched.clear()
    run_steps(config, runner, STEPS, measured, options)
    measured.spans += launched
    return {
        "events": events_of(measured),
        "second_launches": measured.second_launches,
        "waited_in_vain": device.waited_in_vain,
    }


if __name__ == "__main__":
    write_model(with_layers(VARIANTS[MODEL], 1), Path.cwd() / MODEL)
    config = make_config(Path.cwd() / MODEL, "bfloat16", "native")
    options = Namespace(temperature=1.5, top_k=20)
    start_runtime(config)
    device = HeldDevice()
    runner = started_runner(config, device, None, 0, runs_ahead=True)
    launched: list[Any] = []
    note_launches(runner, launched)
    print(json.dumps({"right": measure(0), "wrong": measure(3)}))
