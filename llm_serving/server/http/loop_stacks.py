"""Finds out which function blocks the event loop: a thread looks at the stack of the loop's thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PROJECT = Path(__file__).resolve().parents[3]
LOOK_EVERY_S = 0.03
"""Seconds between two looks at the event loop. If the loop is blocked for a shorter time, the thread may miss it."""
_MAX_FRAMES = 12
"""Maximum number of functions in a description. The innermost functions are kept."""


class LoopStacks:
    """A thread that notes the functions on the event loop's stack if a loop iteration takes too long.

    While the loop is watched, it calls ``iterated`` at short intervals. Otherwise the thread sleeps.

    While a C function keeps the interpreter lock (GIL), this thread cannot read the stack. When the C function returns,
    this thread gets the lock before the calling Python function continues. So this Python function is still on the
    stack.
    """

    def __init__(self, look_every_s: float = LOOK_EVERY_S) -> None:
        """``look_every_s`` must be longer than the usual time between two calls of ``iterated``."""
        self._look_every_s = look_every_s
        self._iterated_at: float | None = None
        """Time of the last call of ``iterated``. None if the loop is not watched."""
        self._found = ""
        self._is_awake = threading.Event()
        self._has_ended = False
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="loop-stacks", daemon=True)
        self._thread.start()

    def iterated(self) -> None:
        """Records that the loop has begun a new iteration. Forgets the functions that were noted before."""
        self._iterated_at, self._found = time.monotonic(), ""
        if not self._is_awake.is_set():
            self._is_awake.set()

    def found(self) -> str:
        """Returns the functions that blocked the loop since the last call of ``iterated``, innermost first.

        The text is empty if the loop was not blocked for ``look_every_s``.
        """
        return self._found

    def pause(self) -> None:
        """Lets the thread sleep until the next call of ``iterated``."""
        self._iterated_at = None
        self._is_awake.clear()

    def stop(self) -> None:
        self._has_ended = True
        self._is_awake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended:
            self._is_awake.wait()
            time.sleep(self._look_every_s)
            iterated_at = self._iterated_at
            if iterated_at is not None and not self._found and time.monotonic() - iterated_at >= self._look_every_s:
                found = described(sys._current_frames().get(self._loop_thread))
                if self._iterated_at == iterated_at:
                    self._found = found


def described(frame: FrameType | None) -> str:
    """Returns the functions of a stack as ``FILE:LINE FUNCTION``, separated by `` < ``, innermost first."""
    return " < ".join(_functions(frame))


def _functions(frame: FrameType | None) -> Iterator[str]:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        path = Path(frame.f_code.co_filename)
        name = path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else Path(*path.parts[-2:])
        yield f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
