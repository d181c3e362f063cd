"""Records the launches that MindSpore makes of operators, and replays them without MindSpore (plugin/launches.h)."""

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
"""Address and size in bytes."""
AllAgree = Callable[[bool], bool]
"""Takes this agent's vote and returns whether all agents that run the graph voted True. All vote at the same places."""
_ANOTHER_AGENT = "another agent cannot replay its launches"


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The numbers of tokens and of sequences of a step. The lengths of a graph's arguments depend on them."""

    tokens: int
    seqs: int


class RecordingError(Exception):
    """The graph ran, but its launches cannot be replayed. The text says why."""

    def __init__(self, reason: str, result: Array, *, is_for_good: bool) -> None:
        super().__init__(reason)
        self.result = result
        self.is_for_good = is_for_good
        """False if a primitive refused these inputs; it may accept other inputs."""


class RecordedLaunches:
    """The launches that a graph made in one run.

    The memory that was named for the recording must live as long as this object. A recording of ``record_any_size``
    needs ``resize`` before ``run``.
    """

    def __init__(self, handle: int, like: Array) -> None:
        self._handle = handle
        self._bytes, self._shape, self._dtype = like.nbytes, like.shape, like.dtype
        self._sizes: StepSizes | None = None
        self._finalize = weakref.finalize(self, load_library().llmk_forget_recording, handle)

    def close(self) -> None:
        """Frees the recording. May be called twice. ``run`` must not be called afterwards."""
        self._finalize()

    def resize(self, sizes: StepSizes) -> None:
        """Sets the sizes of the following replays. They must not exceed the largest sizes."""
        if sizes != self._sizes:
            self._bytes = load_library().llmk_resize_recording(self._handle, sizes.tokens, sizes.seqs)
            self._shape, self._sizes = (-1, *self._shape[1:]), sizes

    def spoil(self) -> None:
        """Fills the memory that a replay's operators write with bytes that make every float a NaN."""
        load_library().llmk_spoil_memory(self._handle)

    @property
    def num_launches(self) -> int:
        """Number of launches of a step. Fused launches count one by one."""
        return int(load_library().llmk_recorded_launches(self._handle))

    @property
    def fusions(self) -> list[str]:
        """The fusions of a step in their order. A name has the fused operators, joined by ``+``."""
        library = load_library()
        names: list[str] = []
        while (name := library.llmk_recorded_fusion(self._handle, len(names))) is not None:
            names.append(name.decode())
        return names

    def generalise(
        self, sizes: StepSizes, other: RecordedLaunches, others: StepSizes, largest: StepSizes, *, fuses: bool
    ) -> str:
        """Turns the recordings of two steps of the same graph into one recording of steps of any size.

        With ``fuses``, one function replaces some consecutive launches (plugin/fusion.h). Returns why this is not
        possible, or an empty string.
        """
        numbers = [number for each in (sizes, others, largest) for number in (each.tokens, each.seqs)]
        problem = ctypes.c_char_p()
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        load_library().llmk_generalise_recording(self._handle, other._handle, array, int(fuses), ctypes.byref(problem))
        return (problem.value or b"").decode()

    def agrees(self, result: Array) -> bool:
        """Replays the launches and returns whether the result has the same bits as ``result``.

        If the bits differ, other memory that the replay wrote (such as keys and values) may be wrong. Then the graph
        must run again. Even after a refusal, the replay takes part in the sums with other agents.
        """
        replayed = self.run(keeps_pace=True).tobytes()
        return take_failure() is None and replayed == result.tobytes()

    def run(self, *, keeps_pace: bool = False) -> Array:
        """Replays the launches over the current contents of the memory.

        The result is valid until the next run of any recording. After the refusal of an operator, the result means
        nothing: ``take_failure`` names the operator, or OperatorRefusedError is raised if failures are not held. With
        ``keeps_pace``, the sums with other agents run even after a refusal.
        """
        address = load_library().llmk_replay(self._handle, int(keeps_pace))
        if address is None:
            raise OperatorRefusedError("an operator refused its inputs; the reason is in the agent's log")
        place = (ctypes.c_uint8 * self._bytes).from_address(address)
        return np.ctypeslib.as_array(place).view(self._dtype).reshape(self._shape)


def recordings_bytes() -> int:
    """Returns the bytes of all recordings and of the memory that they are replayed in."""
    return int(load_library().llmk_recordings_bytes())


def record(
    run: Callable[[], tuple[Array, int]], memory: Iterable[Memory], all_agree: AllAgree = bool
) -> tuple[Array, RecordedLaunches]:
    """Records the launches of one run of a graph. Returns the graph's result and the launches.

    ``run`` runs the graph and returns its result as an array, and the address of the result in MindSpore's memory.
    ``memory`` lists the memory that stays in place: the graph's inputs, parameters and constants. The launches are
    replayed once over spoiled memory and must produce the bits of the result.

    Raises RecordingError if another library computes in the graph, or if the bits differ. In the second case ``run`` is
    called again, because the replay overwrote its results. The error has the ``result`` of ``run``. Raises what ``run``
    and ``all_agree`` raise.

    Agents that run a graph together vote with ``all_agree`` on the recording and on the bits. Therefore either all of
    them have a recording or none has. They do not vote if an operator refused its inputs, because then no agent
    continues.
    """
    result, launches, reason = _recorded(run, list(memory))
    if has_failed():
        raise RecordingError(reason, result, is_for_good=False)
    if not all_agree(launches is not None):
        raise RecordingError(reason or _ANOTHER_AGENT, result, is_for_good=True)
    assert launches is not None, "an agent without a recording votes False"
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
    *,
    fuses: bool = False,
) -> RecordedLaunches:
    """Records two steps of different sizes. Returns launches for steps of any size up to ``largest``.

    ``runs`` has a function like ``run`` of ``record`` for each of the two sizes. ``resize`` sets the size of a replay.
    The parts of ``memory`` begin at the same addresses for every size. The two steps must not have the same ratio of
    tokens to sequences, unless tokens and sequences are equal in every step.

    ``fuses`` is as in ``RecordedLaunches.generalise``. Replays nothing: the caller must compare the bits. Raises
    RecordingError if the launches cannot be replayed, and what ``runs`` and ``all_agree`` (one vote) raise.
    """
    memory, reason = list(memory), ""
    made: list[RecordedLaunches | None] = []
    for run in runs.values():
        result, launches, why = _recorded(run, memory)
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
        raise RecordingError(reason or _ANOTHER_AGENT, result, is_for_good=True)
    return first


def _recorded(run: Callable[[], tuple[Array, int]], memory: list[Memory]) -> tuple[Array, RecordedLaunches | None, str]:
    """Runs a graph and records its launches. Returns its result, the launches or None, and why there are none."""
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
