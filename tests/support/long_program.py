"""Ends a long program together with all processes that it has started."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import psutil

from support.forks import SHARED_FOLDER
from support.processes import has_ended
from support.server_process import SHM_DIRECTORY, shm_entries

STARTED_BY = "LLM_TESTS_STARTED_BY"
"""Environment variable that all processes of a long program inherit. It has a random name for the program.

Servers and nodes have sessions of their own, and nodes have another parent. So neither the process group nor the parent
of a process shows that a program has started it.
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 30.0
"""Seconds after a signal in which a program may end its processes itself."""
_KILL_S = 10.0


def run_program(main: Callable[[], int | None]) -> int:
    """Runs the function ``main`` of a program, and returns the exit code. Ends all processes that are left afterwards.

    A signal raises SystemExit in ``main``. So its ``with`` and ``finally`` blocks end the servers as usual. If this
    takes longer than ``GRACE_S``, all processes are killed. Further signals have no effect.
    """
    os.environ.pop(SHARED_FOLDER, None)  # other programs must not use fork servers that this program ends
    end = _End(f"/{secrets.token_hex(8)}/")
    os.environ[STARTED_BY] = os.environ.get(STARTED_BY, "") + end.name
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end.on_signal)
    try:
        return main() or 0
    except BaseException:
        if not end.received:
            raise
        return end.code
    finally:
        end.kill_all()


class _End:
    """The end of a program that is named ``name`` in the environment of its processes."""

    def __init__(self, name: str) -> None:
        self.name, self._pid, self.received = name, os.getpid(), 0

    @property
    def code(self) -> int:
        return 128 + self.received

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that the program has forked without exec
            os._exit(128 + number)
        if not self.received:
            self.received = number
            print(f"{signal.Signals(number).name}: ends all processes", file=sys.stderr, flush=True)
            threading.Thread(target=self._end_late, daemon=True).start()
            raise SystemExit(self.code)

    def _end_late(self) -> None:
        time.sleep(GRACE_S)
        self.kill_all()
        os._exit(self.code)

    def kill_all(self) -> None:
        """Kills all processes of the program, and removes their shared memory."""
        deadline, pids = time.monotonic() + _KILL_S, set()
        while (found := started_by(self.name)) and time.monotonic() < deadline:
            pids |= {process.pid for process in found}
            for process in found:
                process.kill()
            psutil.wait_procs(found, timeout=0.1)
        for name in (name for pid in pids for name in shm_entries(pid)):
            (SHM_DIRECTORY / name).unlink(missing_ok=True)


def started_by(name: str) -> list[psutil.Process]:
    """Returns the running descendants of this process, and other processes with ``name`` in ``STARTED_BY``."""
    found = set(psutil.Process().children(recursive=True))  # forked processes keep the environment before ``name``
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # processes of other users, and those that have just ended
            if name in process.environ().get(STARTED_BY, "") and process.pid != os.getpid():
                found.add(process)
    return [process for process in found if not has_ended(process)]
