"""The ledger of a chaos run, which checks the outcome of each fault, and the check for leaks in the server."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from support.chaos_faults import KINDS, MAY_REFUSE, Outcome
from support.chaos_load import Answer, ChaosLoad
from support.server_process import ServerProcess, shm_entries

MAX_SLOPE_MIB = 1.0
"""Maximum growth of the server's memory in 10 minutes after the warm-up, in MiB."""
NOISE_MIB = 3.0
"""Growth of memory that a short run may show, because an allocator keeps the memory of bursts of requests."""
SHORT_S, LONG_S = 300.0, 900.0
"""If at most ``SHORT_S`` seconds count after the warm-up, the growth may be ``NOISE_MIB`` larger than ``MAX_SLOPE_MIB``
allows. The allowance falls evenly to 0 at ``LONG_S`` seconds. A run of 30 minutes counts 18 minutes, so it has none.
"""
WARM_UP = 0.4
"""Fraction of the run that is its warm-up. The warm-up also lasts at least until the first round of faults has ended.
"""
AGENT_WARM_UP_S = 30.0
AGENT_LOADED = 0.9
"""An agent's warm-up ends ``AGENT_WARM_UP_S`` seconds after its memory has reached this fraction of its last size. On a
busy machine, an agent takes half a minute to load its model.
"""
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Maximum size of the event loop's pool. Its threads start when large bodies first need them."""
AFTER_FAULT_S = 2.0
"""Time after a recovery in which a request that was sent during the fault may still end with its error."""


@dataclass(frozen=True)
class Holdings:
    """The processes, descriptors, threads and segments of shared memory of a server without requests."""

    agents: int
    descriptors: int
    threads: int
    segments: int

    @classmethod
    def of(cls, server: ServerProcess) -> Holdings:
        """Counts the resources that the server has now. The caller has waited until the server is idle."""
        process = psutil.Process(server.pid)
        return cls(len(server.agents()), process.num_fds(), process.num_threads(), len(shm_entries(server.pid)))

    def leaks(self, later: Holdings) -> list[str]:
        """Returns a line for each resource of which ``later`` has more than is allowed.

        A line has the name of the resource, the earlier number and the later number.
        """
        allowed = {**asdict(self), "threads": self.threads + POOL_THREADS}
        pairs = ((name, value, getattr(later, name)) for name, value in asdict(self).items())
        return [
            f"{name}: {before} at the start, {now} at the end" for name, before, now in pairs if now > allowed[name]
        ]


Samples = list[tuple[float, float]]
"""Resident sizes of a process: time, MiB."""


@dataclass
class MemoryWatch:
    """Samples of the resident memory of the server and of its agents over time."""

    samples: Samples = field(default_factory=list)
    agents: dict[int, Samples] = field(default_factory=dict)
    """The samples of each agent, by process id. A restarted agent has a new process id."""
    first_round_end: float = 0.0
    """The time when each kind of fault had happened once. From then on, the server keeps the memory that all faults
    need.

    0.0 if the run ended earlier.
    """

    reloads: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each reload. Two versions of the model are in memory meanwhile, which is no growth."""

    def add(self, server: ServerProcess) -> None:
        """Takes a sample of the memory of each process that runs now."""
        self.samples.append(_sample(psutil.Process(server.pid)))
        with contextlib.suppress(psutil.Error):  # an agent may end between the listing and the sample
            for agent in server.agents():
                self.add_agent(agent.pid, _sample(agent))

    def add_agent(self, pid: int, sample: tuple[float, float]) -> None:
        """Adds a sample of an agent, unless the agent has just ended. An ended process has a size of 0 MiB."""
        if sample[1] > 0.0:
            self.agents.setdefault(pid, []).append(sample)

    def counted(self) -> Samples:
        """Returns the samples of the server's memory after the warm-up, without those during reloads."""
        late = [each for each in self.samples[int(len(self.samples) * WARM_UP) :] if each[0] >= self.first_round_end]
        return [each for each in late if not any(began <= each[0] <= ended for began, ended in self.reloads)]

    def slope_mib(self) -> float:
        """Returns the growth of the server's memory in MiB in 10 minutes, after the warm-up."""
        return _slope_mib([self.counted()])

    def agents_counted(self) -> list[Samples]:
        """Returns the memory samples of each agent after its warm-up."""
        return [_after_loading(life) for life in self.agents.values()]

    def agents_slope_mib(self) -> float:
        """Returns the growth of an agent's memory in MiB in 10 minutes, over the lifetimes of all agents."""
        return _slope_mib(self.agents_counted())

    def leak(self) -> str:
        """Returns a description of the leak if memory grew faster than allowed, and by more than the noise of a short
        run.

        Returns an empty text if there is no leak.
        """
        server = _too_much("memory", [self.counted()])
        return server or _too_much("memory of an agent", self.agents_counted())


def _sample(process: psutil.Process) -> tuple[float, float]:
    return time.monotonic(), process.memory_info().rss / 2**20


def _after_loading(life: Samples) -> Samples:
    loaded = next(at for at, size in life if size >= AGENT_LOADED * life[-1][1])
    return [each for each in life if each[0] - loaded >= AGENT_WARM_UP_S]


def _slope_mib(lives: Iterable[Samples]) -> float:
    """Returns the growth of the memory in MiB in 10 minutes, by a least-squares fit of straight lines.

    All processes share one slope, but each process has its own start value.
    """
    product = spread = 0.0
    for samples in lives:
        if len(samples) >= 3:
            mean_t = sum(at for at, _ in samples) / len(samples)
            mean_m = sum(size for _, size in samples) / len(samples)
            product += sum((at - mean_t) * (size - mean_m) for at, size in samples)
            spread += sum((at - mean_t) ** 2 for at, _ in samples)
    return 600.0 * product / spread if spread else 0.0


def _too_much(what: str, lives: list[Samples]) -> str:
    """Returns a description of the growth if it exceeds the limit, and otherwise an empty text.

    The growth is the common slope of all processes times the duration of the longest process.
    """
    seconds = max((life[-1][0] - life[0][0] for life in lives if life), default=0.0)
    noise = NOISE_MIB * min(1.0, max(0.0, (LONG_S - seconds) / (LONG_S - SHORT_S)))
    growth, allowed = _slope_mib(lives) * seconds / 600.0, MAX_SLOPE_MIB * seconds / 600.0 + noise
    return f"{what}: {growth:.1f} MiB more, {allowed:.1f} MiB are allowed" if growth > allowed else ""


@dataclass
class Row:
    """The figures of all faults of one kind."""

    count: int = 0
    detected_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    """The recovery times in seconds, without the growing pause before a restart."""
    answered: int = 0
    failed: int = 0
    wrong: int = 0

    def text(self, kind: str) -> str:
        detected = f"{max(self.detected_s):.2f}" if self.detected_s else "-"
        recovered = f"{max(self.recovered_s):.2f}" if self.recovered_s else "-"
        start = f"{max(self.start_s):.2f}" if self.start_s else "-"
        equal = "yes" if not self.wrong else f"NO ({self.wrong})"
        times = f"{detected:>10} {recovered:>11} {start:>13}"
        return f"{kind:12} {self.count:5} {times} {self.answered:8} {self.failed:6} {equal:>10}"


HEADINGS = (
    f"{'fault':12} {'count':>5} {'detected s':>10} {'recovered s':>11} {'without pause':>13} {'answers':>8} "
    f"{'failed':>6} {'equal':>10}"
)


class Ledger:
    """Assigns every answer to the fault during which it ended, and checks whether that fault explains it."""

    def __init__(self, load: ChaosLoad, outcomes: list[Outcome]) -> None:
        self.rows = {kind: Row() for kind in (*KINDS, "no fault")}
        self.losses: list[str] = []
        """Failed requests that no fault explains, wrong texts, and faults without recovery."""
        for outcome in outcomes:
            self._add_outcome(outcome)
        for answer in load.answers:
            self._add_answer(load, answer, outcomes)
        if load.num_hung:
            self.losses.append(f"{load.num_hung} clients never got a response")

    def _add_outcome(self, outcome: Outcome) -> None:
        row = self.rows[outcome.injection.kind]
        row.count += 1
        row.recovered_s.append(outcome.recovered_s)
        row.start_s.append(outcome.recovered_s - outcome.pause_s)
        if outcome.detected_s is not None:
            row.detected_s.append(outcome.detected_s)
        if outcome.problem:
            self.losses.append(f"{outcome.injection}: {outcome.problem}")

    def _add_answer(self, load: ChaosLoad, answer: Answer, outcomes: list[Outcome]) -> None:
        during = [each for each in outcomes if answer.ended >= each.began and answer.began <= each.ended]
        causes = [each for each in outcomes if each.began <= answer.ended <= each.ended + AFTER_FAULT_S]
        kind = (causes or during)[-1].injection.kind if causes or during else "no fault"
        row = self.rows[kind]
        row.answered += 1
        if answer.error:
            row.failed += 1
            status = 503 if answer.status == 200 else answer.status
            if not any(status in MAY_REFUSE.get(each.injection.kind, ()) for each in (*causes, *during)):
                self.losses.append(f"request {answer.number} failed during {kind}: {answer.status} {answer.error}")
        elif not load.is_equal(answer):
            row.wrong += 1
            self.losses.append(f"request {answer.number} got another text during {kind}: {answer.texts!r:.200}")

    def figures(self) -> dict[str, Any]:
        """Returns the numbers of the ledger for the JSON line."""
        rows = self.rows.values()
        detected = [each for row in rows for each in row.detected_s]
        return {
            "faults": sum(row.count for row in rows),
            "answers": sum(row.answered for row in rows),
            "failed": sum(row.failed for row in rows),
            "wrong": sum(row.wrong for row in rows),
            "unexplained": len(self.losses),
            "detected_max_s": round(max(detected, default=0.0), 3),
            "recovered_max_s": round(max((each for row in rows for each in row.recovered_s), default=0.0), 3),
            "recovered_without_pause_max_s": round(max((each for row in rows for each in row.start_s), default=0.0), 3),
        }
