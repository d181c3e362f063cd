"""Runs fuzz cases and counts their outcomes. A case is accepted, refused with a clear error, or a finding."""

from __future__ import annotations

import json
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MAX_CASE_S = 3.0
"""Maximum processor time of one case. A longer case is a hang."""
MAX_GROWTH_MIB = 256.0
"""Maximum growth of the process while the cases run. More is an allocation without a limit."""


class HangError(BaseException):
    """A case took more processor time than ``MAX_CASE_S``.

    It is a BaseException, so that no code under test catches it.
    """


@dataclass
class Findings:
    """Counts the outcomes of the cases so far.

    ``crashes`` has each distinct crash once, with the seed of its first case.
    """

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    crashed: int = 0
    hangs: int = 0
    slowest_s: float = 0.0
    growth_mib: float = 0.0
    crashes: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.crashed and not self.hangs and self.growth_mib <= MAX_GROWTH_MIB

    def run(self, name: str, case: Callable[[], None], refusals: tuple[type[Exception], ...]) -> None:
        """Runs one case. The case may return, or raise one of ``refusals``. Every other exception counts as a crash."""
        began = time.process_time()
        self.cases += 1
        try:
            with _processor_time_limit():
                case()
            self.accepted += 1
        except refusals:
            self.refused += 1
        except KeyboardInterrupt:
            raise
        except HangError as error:
            self.hangs += 1
            frame = traceback.extract_tb(error.__traceback__)[-2]
            self.crashes.setdefault(f"hang in {Path(frame.filename).name}, {frame.name}", name)
        except BaseException as error:  # a panic of a Rust library is a BaseException, but not an Exception
            self.crashed += 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}, {frame.name}"
            self.crashes.setdefault(where, f"{name}: {str(error)[:200]}")
        self.slowest_s = max(self.slowest_s, time.process_time() - began)

    def figures(self) -> str:
        """Returns one JSON line with the counts and the crashes."""
        values = {**self.__dict__, "slowest_s": round(self.slowest_s, 4), "growth_mib": round(self.growth_mib, 1)}
        return json.dumps({**values, "pass": self.is_good})


def peak_mib() -> float:
    """Returns the largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def _processor_time_limit() -> Iterator[None]:
    """Raises HangError in the main thread after ``MAX_CASE_S`` of processor time."""

    def end(number: int, frame: object) -> None:
        raise HangError

    earlier = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
