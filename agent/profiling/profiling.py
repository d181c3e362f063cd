"""Starts and stops a profile of an agent's steps, and writes its files.

On a CPU, MindSpore's profiler writes the time of every operator. On an Ascend, the profiler only collects the data of
msprof, because an analysis takes minutes. The user starts the analysis later, with the command in the reply. On both
devices, ``steps.json`` has a line for each of the first ``MAX_STEPS`` steps.
"""

from __future__ import annotations

import csv
import ctypes
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llm_serving.ipc.messages import OperatorTime, ProfileReply

logger = logging.getLogger("agent.profiling")

MAX_STEPS = 100_000
"""Maximum number of steps in ``steps.json``. Later steps are only counted."""
MAX_OPERATORS = 20
"""Maximum number of operators in the reply. The files have all operators."""
_PR_SET_PDEATHSIG = 1
_ASCEND_HINT = 'python -c "from mindspore.profiler.profiler import analyse; analyse(FOLDER)" writes the tables'


class Profiling:
    """Makes profiles of one agent. Only one profile runs at a time. Only the device thread may use the object."""

    def __init__(self, device: str, rank: int, set_replaying: Callable[[bool], None]) -> None:
        """``set_replaying`` turns replays of recorded launches on and off.

        Replays are off during a profile, because MindSpore's profiler does not see replayed launches.
        """
        self._device = device
        self._rank = rank
        self._set_replaying = set_replaying
        self._folder: Path | None = None
        self._profile: Any = None
        self._steps: list[dict[str, object]] = []
        self._num_steps = self._graph_us = self._sample_us = 0
        self._began = 0.0

    def start(self, seq: int, folder: str) -> ProfileReply:
        """Starts a profile in the subfolder ``agent_RANK`` of ``folder``.

        Raises no exception if this fails: the reply's ``error`` then has the reason.
        """
        if self._folder is not None:
            return ProfileReply(seq=seq, error=f"agent {self._rank} is being profiled already; stop that profile first")
        own = Path(folder) / f"agent_{self._rank}"
        try:
            own.mkdir(parents=True, exist_ok=True)
            # Turning replays off may import MindSpore and set it up. This must happen before MindSpore's profiler
            # starts.
            self._set_replaying(False)
            self._profile = _start_mindspore_profile(self._device, own)
        except (OSError, RuntimeError, ValueError) as error:
            self._set_replaying(True)
            return ProfileReply(seq=seq, error=f"agent {self._rank} cannot write a profile to {own}: {error}")
        self._folder, self._began = own, time.perf_counter()
        self._steps, self._num_steps, self._graph_us, self._sample_us = [], 0, 0, 0
        return ProfileReply(seq=seq)

    def add_step(self, kind: str, num_tokens: int, num_seqs: int, times_us: tuple[int, int, int]) -> None:
        """Adds a step that has just run to the profile.

        ``times_us`` has three numbers of microseconds: in the queue, in the graph and in the sampler.
        """
        if self._folder is None:
            return
        queue_us, graph_us, sample_us = times_us
        self._num_steps += 1
        self._graph_us += graph_us
        self._sample_us += sample_us
        if len(self._steps) < MAX_STEPS:
            end_us = round((time.perf_counter() - self._began) * 1e6)
            names = ("end_us", "kind", "tokens", "sequences", "queue_us", "graph_us", "sample_us")
            values = (end_us, kind, num_tokens, num_seqs, queue_us, graph_us, sample_us)
            self._steps.append(dict(zip(names, values, strict=True)))

    def stop(self, seq: int) -> ProfileReply:
        """Ends the profile, writes its files, and returns the summary."""
        folder, self._folder = self._folder, None
        if folder is None:
            return ProfileReply(seq=seq, error=f"agent {self._rank} is not being profiled")
        self._set_replaying(True)
        try:
            self._profile.stop()
            lines = "".join(json.dumps(step) + "\n" for step in self._steps)
            (folder / "steps.json").write_text(lines, encoding="utf-8")
            operators = _operator_times(folder)
        except (OSError, RuntimeError, ValueError) as error:
            return ProfileReply(seq=seq, error=f"agent {self._rank} could not complete the profile: {error}")
        finally:
            self._profile, self._steps = None, []
        return ProfileReply(
            seq=seq,
            folder=str(folder),
            steps=self._num_steps,
            graph_us=self._graph_us,
            sample_us=self._sample_us,
            operators=operators,
            note=_ASCEND_HINT if self._device == "Ascend" else "",
        )


def _start_mindspore_profile(device: str, folder: Path) -> Any:
    """Starts MindSpore's profiler and returns it. On an Ascend, the profiler does not analyse its data."""
    from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    end_children_with_this_process()
    on_ascend = device == "Ascend"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.NPU] if on_ascend else [])]
    handler = tensorboard_trace_handler(str(folder), analyse_flag=not on_ascend)
    profiler = profile(activities=activities, on_trace_ready=handler)
    profiler.start()
    return profiler


@cache
def end_children_with_this_process() -> None:
    """Makes the kernel kill all processes that are forked from now on, as soon as this process ends.

    MindSpore analyses a profile in forked processes. Without this function, one of them would wait for ever if the
    agent is killed during the analysis.
    """
    control, parent = ctypes.CDLL(None).prctl, 0

    def note_parent() -> None:
        nonlocal parent
        parent = os.getpid()

    def end_with_parent() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call
            os._exit(1)

    os.register_at_fork(before=note_parent, after_in_child=end_with_parent)


def _operator_times(folder: Path) -> list[OperatorTime]:
    """Returns the operators with the largest total time, from the table that MindSpore writes on a CPU."""
    found = []
    for file in sorted(folder.rglob("cpu_op_type_info_*.csv")):
        with file.open(encoding="utf-8", newline="") as table:
            for row in csv.DictReader(table):
                name, count, total_ms = row["op_type"], int(row["type_occurrences"]), float(row["total_compute_time"])
                found.append(OperatorTime(name=name[:128], count=count, total_ms=total_ms))
    return sorted(found, key=lambda each: -each.total_ms)[:MAX_OPERATORS]
