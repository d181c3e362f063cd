"""Launches of operators, recorded while MindSpore makes them and replayed without it (plugin/launches.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.kernels.library import OperatorRefusedError, has_failed, load_library, take_failure

Array = npt.NDArray[Any]
Memory = tuple[int, int]
"""Address and bytes."""
AllAgree = Callable[[bool], bool]
"""Whether every agent that runs the graph says so; all of them ask at the same places."""
_ANOTHER_AGENT = "another agent cannot replay its launches"


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the lengths of a graph's arguments depend on."""

    tokens: int
    seqs: int


class RecordingError(Exception):
    """The graph ran, but its launches cannot be replayed; the text says why."""

    def __init__(self, reason: str, result: Array, *, is_for_good: bool) -> None:
        super().__init__(reason)
        self.result = result
        self.is_for_good = is_for_good
        """False where a primitive refused these inputs, and may take others."""


class RecordedLaunches:
    """What a graph launched in one run. The memory that was named when it was recorded must stay as long as this.
    ``resize`` is for those of ``record_any_size``, before any ``run``."""

    def __init__(self, handle: int, like: Array) -> None:
        self._handle = handle
        self._bytes, self._shape, self._dtype = like.nbytes, like.shape, like.dtype
        self._sizes: StepSizes | None = None
        self._finalize = weakref.finalize(self, load_library().llmk_forget_recording, handle)

    def close(self) -> None:
        """May be called twice; there is no ``run`` after it."""
        self._finalize()

    def resize(self, sizes: StepSizes) -> None:
        """What follows are replays of a step of these sizes, which are no larger than the largest there may be."""
        if sizes != self._sizes:
            self._bytes = load_library().llmk_resize_recording(self._handle, sizes.tokens, sizes.seqs)
            self._shape, self._sizes = (-1, *self._shape[1:]), sizes

    def spoil(self) -> None:
        """Fill what a replay has between its operators with bytes that make no float a number."""
        load_library().llmk_spoil_memory(self._handle)

    def generalise(self, sizes: StepSizes, other: RecordedLaunches, others: StepSizes, largest: StepSizes) -> str:
        """Make of this recording of a step one of steps of any size, by that of another step of the same graph. Why
        that cannot be; empty where it can."""
        numbers = [number for each in (sizes, others, largest) for number in (each.tokens, each.seqs)]
        problem = ctypes.c_char_p()
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        load_library().llmk_generalise_recording(self._handle, other._handle, array, ctypes.byref(problem))
        return (problem.value or b"").decode()

    def agrees(self, result: Array) -> bool:
        """Whether a replay now has these bits. Where not, what else it wrote, such as keys and values, may be wrong:
        the graph must run again. It makes its sums with other agents whatever comes of it."""
        replayed = self._replay(keeps_pace=True).tobytes()
        return take_failure() is None and replayed == result.tobytes()

    def run(self) -> Array:
        """Launch it all again over what lies in the named memory now. The result is valid until the next run of any
        recording; after an operator's refusal (``take_failure``) it means nothing. Raises OperatorRefusedError
        where refusals are not held back."""
        return self._replay(keeps_pace=False)

    def _replay(self, *, keeps_pace: bool) -> Array:
        address = load_library().llmk_replay(self._handle, int(keeps_pace))
        if address is None:
            raise OperatorRefusedError("an operator refused its inputs; the reason is in the agent's log")
        place = (ctypes.c_uint8 * self._bytes).from_address(address)
        return np.ctypeslib.as_array(place).view(self._dtype).reshape(self._shape)


def recordings_bytes() -> int:
    """What all recorded launches hold, and the memory that they are replayed in."""
    return int(load_library().llmk_recordings_bytes())


def record(
    run: Callable[[], tuple[Array, int]], memory: Iterable[Memory], all_agree: AllAgree = bool
) -> tuple[Array, RecordedLaunches]:
    """Calls ``run``, which runs a graph and gives its result as an array and the address where MindSpore has it, and
    gives the result and the launches.

    ``memory`` is what stays where it is: the graph's inputs, parameters and constants. The launches are replayed once,
    over memory that was spoiled before, and must have the result's bits. Raises RecordingError, its ``result`` that of
    ``run``, where they have not (``run`` is called again then, over what the replay wrote), or where something but our
    kernels computes in the graph; what ``run`` and ``all_agree`` raise.

    Of agents that run a graph together all have a recording, or none: ``all_agree`` is asked whether there is one, and
    whether its replay has the bits, unless an operator refused its inputs, after which no agent goes on.
    """
    result, launches, reason = _recorded(run, list(memory))
    if has_failed():
        raise RecordingError(reason, result, is_for_good=False)
    if not all_agree(launches is not None):
        raise RecordingError(reason or _ANOTHER_AGENT, result, is_for_good=True)
    assert launches is not None, "nobody agrees to a recording that this agent has not"
    launches.spoil()
    if not all_agree(launches.agrees(result)):
        launches.close()
        raise RecordingError("a replay gives another result", run()[0].copy(), is_for_good=True)
    return result, launches


def record_any_size(
    runs: Mapping[StepSizes, Callable[[], tuple[Array, int]]],
    largest: StepSizes,
    memory: Iterable[Memory],
    all_agree: AllAgree = bool,
) -> RecordedLaunches:
    """Calls both ``runs``, as of ``record``, of steps of these sizes, and gives launches of a step of any size up to
    ``largest``: ``resize`` says which. What stays in ``memory`` begins where it did, however large the step. In no two
    steps may tokens and sequences have the same ratio, unless they are the same number in every step.

    Nothing is replayed: whether the launches have the graph's bits is for the caller to find out. Raises RecordingError
    where they cannot be replayed, and what ``runs`` and ``all_agree``, asked once, raise.
    """
    memory, reason = list(memory), ""
    made: list[RecordedLaunches | None] = []
    for run in runs.values():
        result, launches, why = _recorded(run, memory)
        made.append(launches)
        reason = reason or why
    (first, second), (sizes, others) = made, runs
    if first is not None and second is not None:
        reason = first.generalise(sizes, second, others, largest)
    if second is not None:
        second.close()
    agreed = all_agree(not (reason or has_failed()))
    if not agreed or first is None:
        if first is not None:
            first.close()
        raise RecordingError(reason or _ANOTHER_AGENT, result, is_for_good=True)
    return first


def _recorded(run: Callable[[], tuple[Array, int]], memory: list[Memory]) -> tuple[Array, RecordedLaunches | None, str]:
    """The result, and the launches, or why there are none."""
    library = load_library()
    library.llmk_begin_recording()
    problem = ctypes.c_char_p()
    try:
        result, address = run()
        result = result.copy()
    except BaseException:
        library.llmk_end_recording(None, None, 0, None, ctypes.byref(problem))
        raise
    starts = (ctypes.c_void_p * len(memory))(*[start for start, _ in memory])
    sizes = (ctypes.c_int64 * len(memory))(*[size for _, size in memory])
    handle = library.llmk_end_recording(starts, sizes, len(memory), address, ctypes.byref(problem))
    reason = (problem.value or b"").decode()
    return result, None if handle is None else RecordedLaunches(handle, result), reason
