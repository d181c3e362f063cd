"""Records the launches of a graph, and replays them without MindSpore (plugin/launches.h). A launch is one call of an
operator by MindSpore.
"""

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
Results = tuple[Array, ...]
"""The results of a graph, in the order in which the graph returns them."""
Run = Callable[[], tuple[Results, tuple[int, ...]]]
"""Runs a graph. Returns its results, and the addresses of the results in MindSpore's memory."""
Memory = tuple[int, int]
"""Address and size in bytes."""
AllAgree = Callable[[bool], bool]
"""Type of functions that let all agents of a graph decide together. The argument is the vote of this agent. The result
is True if all agents that run the graph voted True. Every agent must call the function equally often.
"""
_ANOTHER_AGENT = "another agent cannot replay its launches"


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The numbers of tokens, sequences and gathered blocks of a step. They determine the lengths of a graph's
    arguments.
    """

    tokens: int
    seqs: int
    blocks: int = 0
    """Number of different cache blocks that the graph gathers into one array. 0 if the graph gathers no blocks."""


class RecordingError(Exception):
    """The launches of a graph cannot be replayed, although the graph itself ran. The message gives the reason, and
    ``results`` are the results of the graph.
    """

    def __init__(self, reason: str, results: Results, *, is_for_good: bool) -> None:
        super().__init__(reason)
        self.results = results
        self.is_for_good = is_for_good
        """True if no recording of this graph can be replayed. False if a primitive refused the inputs of this run, so
        that another run may succeed.
        """


class RecordedLaunches:
    """The recorded launches of one run of a graph. They can be replayed.

    ``memory``, the argument of ``record`` and ``record_any_size``, must live as long as this object. If
    ``record_any_size`` made this object, call ``resize`` before ``run``.
    """

    def __init__(self, handle: int, like: Results) -> None:
        self._handle = handle
        self._bytes = (ctypes.c_int64 * len(like))(*[array.nbytes for array in like])
        self._forms = [(array.shape, array.dtype) for array in like]
        self._addresses = (ctypes.c_void_p * len(like))()
        self._sizes: StepSizes | None = None
        self._finalize = weakref.finalize(self, load_library().llmk_forget_recording, handle)

    def close(self) -> None:
        """Frees the recording. May be called twice. ``run`` must not be called afterwards."""
        self._finalize()

    def resize(self, sizes: StepSizes) -> None:
        """Sets the sizes of the step for the following replays.

        ``sizes`` must not exceed ``largest``, the argument of ``record_any_size``.
        """
        if sizes != self._sizes:
            load_library().llmk_resize_recording(self._handle, sizes.tokens, sizes.seqs, sizes.blocks, self._bytes)
            self._forms = [((-1, *shape[1:]), dtype) for shape, dtype in self._forms]
            self._sizes = sizes

    def spoil(self) -> None:
        """Fills the memory that the operators of a replay write. The bytes make every float a NaN.

        If the recording misses an operator, the results of the next replay then have NaN.
        """
        load_library().llmk_spoil_memory(self._handle)

    @property
    def num_launches(self) -> int:
        """Number of launches of a step. A fused launch counts as the launches that it replaces. A Reshape counts, even
        if replays skip it.
        """
        return int(load_library().llmk_recorded_launches(self._handle))

    @property
    def fusions(self) -> list[str]:
        """The names of the fused launches of a step, in their order. A name consists of the operators, joined by ``+``.
        """
        library = load_library()
        names: list[str] = []
        while (name := library.llmk_recorded_fusion(self._handle, len(names))) is not None:
            names.append(name.decode())
        return names

    def generalise(
        self, sizes: StepSizes, other: RecordedLaunches, others: StepSizes, largest: StepSizes, *, fuses: bool
    ) -> str:
        """Combines this recording and ``other``, made from a step of another size, into one recording for steps of any
        size.

        With ``fuses``, one function replaces several launches where plugin/fusion.h allows this. Returns an empty
        string, or the reason if the recordings cannot be combined.
        """
        numbers = [number for each in (sizes, others, largest) for number in (each.tokens, each.seqs, each.blocks)]
        problem = ctypes.c_char_p()
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        load_library().llmk_generalise_recording(self._handle, other._handle, array, int(fuses), ctypes.byref(problem))
        return (problem.value or b"").decode()

    def agrees(self, results: Results) -> bool:
        """Replays the launches and returns whether the results have the same bits as ``results``.

        If the bits differ, the replay may also have written wrong values to other memory, such as the KV cache. Then
        the caller must run the graph again. The replay runs the sums with other agents even if an operator refuses its
        inputs.
        """
        replayed = [array.tobytes() for array in self.run(keeps_pace=True)]
        return take_failure() is None and replayed == [array.tobytes() for array in results]

    def run(self, *, keeps_pace: bool = False) -> Results:
        """Replays the launches with the current contents of their memory. Returns the results, which are valid until
        the next run of any recording.

        If an operator refuses its inputs, raises OperatorRefusedError. But if ``hold_failures(True)`` was called
        before, returns undefined results, and ``take_failure`` returns the name of the operator. With ``keeps_pace``,
        the sums over the agents run even after a refusal, because the other agents wait for them.
        """
        if not load_library().llmk_replay(self._handle, int(keeps_pace), self._addresses):
            raise OperatorRefusedError("an operator refused its inputs; the reason is in the agent's log")
        return tuple(
            _array_at(address or 0, num_bytes, *form)
            for address, num_bytes, form in zip(self._addresses, self._bytes, self._forms, strict=True)
        )


def _array_at(address: int, num_bytes: int, shape: tuple[int, ...], dtype: Any) -> Array:
    place = (ctypes.c_uint8 * num_bytes).from_address(address)
    array: Array = np.ctypeslib.as_array(place).view(dtype).reshape(shape)
    return array


def recordings_bytes() -> int:
    """Returns the size in bytes of all recordings and of the memory that their replays write."""
    return int(load_library().llmk_recordings_bytes())


def record(run: Run, memory: Iterable[Memory], all_agree: AllAgree = bool) -> tuple[Results, RecordedLaunches]:
    """Records the launches of one run of a graph. Returns the graph's results and the launches.

    ``memory`` lists the memory whose addresses never change: the graph's inputs, parameters and constants. Before this
    function returns, it replays the launches once as a test. It first fills all other memory of the replay with NaN.
    The replay must produce the same bits as the graph.

    Raises RecordingError if the launches cannot be replayed, for example because a kernel of MindSpore itself computes
    a part of the graph. Also raises RecordingError if the replay gives other bits. Then ``run`` is called again first,
    because the replay has overwritten its results. The attribute ``results`` of the error has the results of the last
    call of ``run``. Exceptions of ``run`` and ``all_agree`` are passed on.

    Agents that run a graph together call ``all_agree`` twice. The first vote is whether the agent has a recording, the
    second whether its replay gave the right bits. So either all agents get a recording or none. If an operator refused
    its inputs, the agents do not vote, because the step has failed for all of them.
    """
    results, launches, reason = _recorded(run, list(memory))
    if has_failed():
        raise RecordingError(reason, results, is_for_good=False)
    if not all_agree(launches is not None):
        raise RecordingError(reason or _ANOTHER_AGENT, results, is_for_good=True)
    assert launches is not None, "an agent without a recording votes False"
    launches.spoil()
    if not all_agree(launches.agrees(results)):
        launches.close()
        raise RecordingError("a replay gives another result", copies(run()[0]), is_for_good=True)
    return results, launches


def copies(results: Results) -> Results:
    """Returns copies of the arrays."""
    return tuple(array.copy() for array in results)


def record_any_size(
    runs: Mapping[StepSizes, Run],
    largest: StepSizes,
    memory: Iterable[Memory],
    all_agree: AllAgree = bool,
    *,
    fuses: bool = False,
) -> RecordedLaunches:
    """Records two steps of different sizes. Returns one recording that can replay steps of any size up to ``largest``.

    ``runs`` maps the sizes of each step to a function that runs it, like ``run`` of ``record``. From the first step to
    the second, the numbers of tokens, sequences and blocks must grow by three different factors. There is one
    exception: if every step has as many tokens as sequences, these two may grow by the same factor. Each range of
    ``memory`` must begin at the same address for every size. Before a replay, the caller must call ``resize`` with the
    sizes of the step.

    With ``fuses``, one function replaces several launches where plugin/fusion.h allows this. This function makes no
    test replay: the caller must compare the results of a replay with those of the graph. Raises RecordingError if the
    launches cannot be replayed. Exceptions of ``runs`` and ``all_agree`` are passed on.
    """
    memory, reason = list(memory), ""
    made: list[RecordedLaunches | None] = []
    for run in runs.values():
        results, launches, why = _recorded(run, memory)
        made.append(launches)
        reason = reason or why
    (first, second), (sizes, others) = made, runs
    if first is not None and second is not None:
        reason = first.generalise(sizes, second, others, largest, fuses=fuses)
    if second is not None:
        second.close()
    agreed = all_agree(not (reason or has_failed()))
    if not agreed or first is None:
        if first is not None:
            first.close()
        raise RecordingError(reason or _ANOTHER_AGENT, results, is_for_good=True)
    return first


def _recorded(run: Run, memory: list[Memory]) -> tuple[Results, RecordedLaunches | None, str]:
    """Runs a graph and records its launches. Returns (results of the graph, recording, "").

    If the launches cannot be replayed, returns None instead of the recording, and the reason instead of the empty text.
    """
    library = load_library()
    library.llmk_begin_recording()
    problem = ctypes.c_char_p()
    try:
        found, addresses = run()
        results = copies(found)
    except BaseException:
        library.llmk_end_recording(None, None, 0, None, 0, ctypes.byref(problem))
        raise
    places = (ctypes.c_void_p * len(addresses))(*addresses)
    starts = (ctypes.c_void_p * len(memory))(*[start for start, _ in memory])
    sizes = (ctypes.c_int64 * len(memory))(*[size for _, size in memory])
    handle = library.llmk_end_recording(starts, sizes, len(memory), places, len(places), ctypes.byref(problem))
    reason = (problem.value or b"").decode()
    return results, None if handle is None else RecordedLaunches(handle, results), reason
