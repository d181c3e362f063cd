"""Records which functions of this project one request calls, in the server and in its agent.

The command ``python -m support.call_trace`` runs the real agent, which writes its record when it ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType

from support.small_configs import REPOSITORY
from support.time_limits import time_limit

RECORD_VARIABLE = "LLM_SERVING_TEST_CALL_RECORD"
"""Environment variable: the file that the agent writes its record to."""

PACKAGES = tuple(f"{REPOSITORY / package}{os.sep}" for package in ("llm_serving", "agent"))


@dataclass(frozen=True)
class Call:
    """One call of a function.

    Its name consists of file and qualified name, as in ``agent/sampler.py:Sampler.sample``.
    """

    at: int
    """Nanoseconds of the machine's monotonic clock, which all processes share."""
    name: str
    callers: tuple[str, ...]
    """The project's functions on the call stack, the outermost first."""


class CallRecorder:
    """Records the calls of every thread whose profile function (``sys.setprofile``) is this object."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._names: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (name := self._name(frame.f_code)) is None:
            return
        callers: list[str] = []
        caller = frame.f_back
        while caller is not None:
            if (its_name := self._name(caller.f_code)) is not None:
                callers.append(its_name)
            caller = caller.f_back
        self.calls.append(Call(time.monotonic_ns(), name, tuple(reversed(callers))))

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            ours = code.co_filename.startswith(PACKAGES)
            file = os.path.relpath(code.co_filename, REPOSITORY) if ours else ""
            self._names[code] = f"{file}:{code.co_qualname}" if ours else None
        return self._names[code]


def read_calls(path: Path) -> list[Call]:
    """Returns the calls that an agent recorded. The agent writes them when it ends."""
    deadline = time.monotonic() + time_limit(20)
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return [Call(call["at"], call["name"], tuple(call["callers"])) for call in json.loads(path.read_text())]


def named_calls(calls: Iterable[Call], points: Sequence[str]) -> list[str]:
    """Returns the functions on the call path to each of ``points``, in order, each function once.

    The path to a point has the point itself and the public functions on the call stack of its first call. A function
    that was called before the recording began, for example a loop, is not part of the path.
    """
    ordered = sorted(calls, key=lambda call: call.at)
    called = {call.name for call in ordered}
    path: dict[str, None] = {}
    for point in points:
        first = next((call for call in ordered if call.name == point), None)
        assert first is not None, f"{point} was not called"
        path.update(dict.fromkeys(name for name in (*first.callers, point) if name in called and _is_public(name)))
    return list(path)


def _is_public(name: str) -> bool:
    parts = name.partition(":")[2].split(".")
    return all(part == "__call__" or not part.startswith(("_", "<")) for part in parts)


def _record_agent() -> None:
    recorder, leave = CallRecorder(), os._exit

    def write_and_leave(code: int) -> None:
        sys.setprofile(None)
        path = Path(os.environ[RECORD_VARIABLE])
        part = path.with_suffix(f".{threading.get_ident()}")  # several threads may end at the same time
        part.write_text(json.dumps([asdict(call) for call in recorder.calls]))
        part.replace(path)
        leave(code)

    os._exit = write_and_leave  # type: ignore[assignment]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    runpy.run_module("agent", run_name="__main__")


if __name__ == "__main__":
    _record_agent()
