"""Launches graphs on an Ascend. The results are copied to the host while the next graph runs. Sources: docs/ascend.md.

Calls of MindSpore go through the argument ``mindspore``, so that a test can record them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from agent.backends.device import DeviceHooks
from agent.backends.launch import Launch, OnDevice, as_array
from agent.weights.storage import Array

POLL_S = 0.0001
"""Time in seconds between two checks whether the device has finished. ``Event.synchronize`` is not used, because it may
block all other Python threads while it waits.
"""


class DeviceLaunch(Launch):
    """A launch on an Ascend. Its constructor queues the copies of the results to the host and returns immediately.

    The device makes the copies after this launch and before any later launch.
    """

    def __init__(self, results: tuple[OnDevice, ...], fetched: slice, mindspore: Any) -> None:
        super().__init__(results, fetched)
        self._copies = [each.move_to("CPU", blocking=False) for each in results[fetched]]
        self._event = mindspore.runtime.Event()
        self._event.record()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._error: RuntimeError | None = None
        """The error of the device. None if the device has computed the launch, and while it computes."""
        self._is_done = threading.Event()

    def fetch(self) -> tuple[Array, ...]:
        self._is_done.wait()
        if self._error is not None:
            raise self._error  # also if no results were selected, because then no copy can report the failure
        return tuple(map(as_array, self._copies))

    def when_fetched(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> None:
        """Waits until the results are on the host or the device has failed, then calls the callbacks.

        If the device has failed, each later call of ``fetch`` raises the error. Only the thread ``device-watch`` of
        ``AscendHooks`` calls this method.
        """
        try:
            while not self._event.query():
                time.sleep(POLL_S)
        except Exception as error:
            # No exception may end this thread, because later launches would never end. Callers of ``fetch`` handle
            # RuntimeError only.
            text = f"{type(error).__name__}: {error}"
            self._error = error if isinstance(error, RuntimeError) else RuntimeError(text)
        with self._lock:
            self._is_done.set()
        for callback in self._callbacks:
            callback()


class AscendHooks(DeviceHooks):
    """Launches graphs without waiting for their results. The thread ``device-watch`` waits for the end of each launch,
    in the order of the launches.
    """

    def __init__(self, mindspore: Any) -> None:
        self._mindspore = mindspore
        self._launches: SimpleQueue[DeviceLaunch] = SimpleQueue()
        threading.Thread(target=self._watch, name="device-watch", daemon=True).start()

    def launch(self, run: Callable[[], tuple[OnDevice, ...]], fetched: slice) -> Launch:
        launch = DeviceLaunch(run(), fetched, self._mindspore)
        self._launches.put(launch)
        return launch

    def _watch(self) -> None:
        while True:
            self._launches.get().wait()
