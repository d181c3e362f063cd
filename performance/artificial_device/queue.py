"""Implements an artificial device: a thread that runs queued launches, and the pending results of a launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from agent.backends.launch import Launch, OnDevice, as_array
from agent.weights.storage import Array

Run = Callable[[], tuple[OnDevice, ...]]
SPIN_S = 0.0002
"""A thread spins instead of sleeping for the last ``SPIN_S`` seconds of a delay, because a sleep ends late."""


STEP = "step"
"""The name of every launch of a step graph. A launch of a sampling graph has the name of that graph."""


@dataclass(slots=True)
class Busy:
    """A period in which the device ran a launch, in seconds of ``time.perf_counter``."""

    start: float
    end: float
    graph: str = STEP
    """The name of the launched graph."""


class QueuedLaunch(Launch):
    """A launch in the queue of an artificial device. The results exist after the device's thread has run the launch."""

    def __init__(self, fetched: slice) -> None:
        super().__init__((), fetched)
        self._copies: tuple[Array, ...] = ()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_done = threading.Event()

    def results(self) -> tuple[OnDevice, ...]:
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        return self._results

    def fetch(self) -> tuple[Array, ...]:
        self.results()
        return self._copies

    def when_fetched(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, results: tuple[Array, ...], error: Exception | None) -> None:
        """Sets the results, or the error. Copies the results that the host fetches, because a later launch may
        overwrite them.

        Only the device's thread calls this method.
        """
        with self._lock:
            self._results, self._error = results, error
            self._copies = tuple(map(np.copy, results[self._fetched]))
            self._is_done.set()
        for callback in self._callbacks:
            callback()


@dataclass
class ArtificialDevice:
    """Runs launches one after the other in its own thread, which never ends."""

    device_s: float = 0.0
    """Minimum seconds that a step graph takes on the device."""
    launch_s: float = 0.0
    """Minimum seconds that the host needs to launch a step graph."""
    sampling_device_s: float = 0.0
    """Minimum seconds that each graph of sampling takes on the device."""
    sampling_launch_s: float = 0.0
    """Minimum seconds that the host needs to launch a graph of sampling."""
    wrong_every: int = 0
    """Each launch of the graph that draws tokens has a number. It draws wrong tokens if its number is a multiple of
    ``wrong_every``. 0: no launch draws wrong tokens.
    """
    are_wrong: list[bool] = field(default_factory=list)
    """For each launch of the graph that draws tokens: True if it drew wrong tokens."""
    captures: bool = False
    """True if a launch overwrites the results of an earlier launch whose results have equal shapes.

    Graphs that MindSpore has captured do the same.
    """
    periods: list[Busy] = field(default_factory=list)
    """The periods in which the device was busy, one for each launch."""

    def __post_init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Run, QueuedLaunch, str]] = SimpleQueue()
        self._memory: dict[tuple[object, ...], tuple[Array, ...]] = {}
        self._graph = STEP
        threading.Thread(target=self._serve, name="artificial-device", daemon=True).start()

    def launch(self, run: Run, fetched: slice) -> QueuedLaunch:
        """Queues a launch. The device's thread later calls ``run`` and stores the results in the device's memory."""
        start, launch = time.perf_counter(), QueuedLaunch(fetched)
        sleep_until(start + (self.launch_s if self._graph == STEP else self.sampling_launch_s))
        self._waiting.put((run, launch, self._graph))
        return launch

    @contextmanager
    def sampling(self, graph: str) -> Iterator[None]:
        """Lets the launches inside the ``with`` block count as launches of ``graph``, a graph of sampling."""
        self._graph = graph
        try:
            yield
        finally:
            self._graph = STEP

    def is_wrong_draw(self) -> bool:
        """Counts a launch of the graph that draws tokens. Returns whether it must draw wrong tokens."""
        number = len(self.are_wrong) + 1
        self.are_wrong.append(self.wrong_every > 0 and number % self.wrong_every == 0)
        return self.are_wrong[-1]

    def _serve(self) -> None:
        while True:
            run, launch, graph = self._waiting.get()
            start = time.perf_counter()
            results: tuple[Array, ...] = ()
            error = None
            try:
                results = self._stored(tuple(map(as_array, run())))
            except Exception as problem:
                error = problem
            sleep_until(start + (self.device_s if graph == STEP else self.sampling_device_s))
            self.periods.append(Busy(start, time.perf_counter(), graph))
            launch.finish(results, error)

    def _stored(self, results: tuple[Array, ...]) -> tuple[Array, ...]:
        """Copies the results of a launch to new memory. If ``captures`` is True, the results
        overwrite those of an earlier launch with equal shapes.
        """
        if not self.captures:
            return tuple(map(np.copy, results))
        layout = tuple((each.shape, each.dtype) for each in results)
        memory = self._memory.setdefault(layout, tuple(map(np.empty_like, results)))
        for place, result in zip(memory, results, strict=True):
            place[...] = result
        return memory


def sleep_until(moment: float) -> None:
    """Sleeps until ``time.perf_counter()`` reaches ``moment``. Spins at the end, because a sleep ends too late."""
    rest = moment - time.perf_counter()
    if rest > SPIN_S:
        time.sleep(rest - SPIN_S)
    while time.perf_counter() < moment:
        pass
