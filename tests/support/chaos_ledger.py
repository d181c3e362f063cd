"""The ledger of a chaos run, fault by fault, and the watch on what the server holds."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from support.chaos_faults import KINDS, MAY_REFUSE, Outcome
from support.chaos_load import Answer, ChaosLoad
from support.server_process import ServerProcess, shm_entries

MAX_SLOPE_MIB = 1.0
"""Maximum growth of the server in 10 minutes after the warm-up."""
NOISE_MIB = 3.0
"""Growth that a short run may show, because an allocator keeps what bursts of requests took."""
WARM_UP = 0.4
"""Part of the run after which memory counts."""
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
        """Count what the server holds now. The caller has waited until it is idle."""
        process = psutil.Process(server.pid)
        return cls(len(server.agents()), process.num_fds(), process.num_threads(), len(shm_entries(server.pid)))

    def leaks(self, later: Holdings) -> list[str]:
        """Return the names and numbers of everything that ``later`` has more of."""
        allowed = {**asdict(self), "threads": self.threads + POOL_THREADS}
        pairs = ((name, value, getattr(later, name)) for name, value in asdict(self).items())
        return [
            f"{name}: {before} at the start, {now} at the end" for name, before, now in pairs if now > allowed[name]
        ]


@dataclass
class MemoryWatch:
    """The resident size of the server over time."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def add(self, pid: int) -> None:
        self.samples.append((time.monotonic(), psutil.Process(pid).memory_info().rss / 2**20))

    def counted(self) -> list[tuple[float, float]]:
        """Return the samples after the warm-up."""
        return self.samples[int(len(self.samples) * WARM_UP) :]

    def slope_mib(self) -> float:
        """Return the growth in 10 minutes by a least-squares line through the samples after the warm-up."""
        samples = self.counted()
        if len(samples) < 3:
            return 0.0
        mean_t = sum(at for at, _ in samples) / len(samples)
        mean_m = sum(size for _, size in samples) / len(samples)
        spread = sum((at - mean_t) ** 2 for at, _ in samples)
        return 600.0 * sum((at - mean_t) * (size - mean_m) for at, size in samples) / spread

    def leak(self) -> str:
        """Return a text if the memory grew faster than allowed, and by more than the noise of a short run."""
        samples = self.counted()
        if not samples:
            return ""
        growth = self.slope_mib() * (samples[-1][0] - samples[0][0]) / 600.0
        allowed = MAX_SLOPE_MIB * (samples[-1][0] - samples[0][0]) / 600.0 + NOISE_MIB
        return f"memory: {growth:.1f} MiB more, {allowed:.1f} MiB are allowed" if growth > allowed else ""


@dataclass
class Row:
    """The faults of one kind."""

    count: int = 0
    detected_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    """The recoveries without the growing pause before a restart."""
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
    """Attributes every answer to the fault during which it ended, and judges it."""

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
        """Return the counts for the JSON line."""
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
