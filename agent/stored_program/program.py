"""Defines the form in which recorded launches are stored, so that another process can run them.

An argument of a stored launch has no address, because addresses differ between processes. Instead, the argument names
its memory, or refers to the output of another launch.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from agent.kernels import Argument, KernelError, RecordedLaunches, RecordingError, call_operator, record
from agent.weights.storage import Array

_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
"""Size in bytes of an element, for each type that an operator writes."""


class ProgramError(Exception):
    """Raised if the launches of a graph cannot be stored in a file, or if stored launches cannot be used.

    The message gives the reason.
    """


class StoredArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that a launch reads or writes."""

    type: str
    memory: str = ""
    """Name of the memory that holds the tensor, such as a weight or an input. Empty for the output of a launch."""
    launch: int = -1
    """Index of the launch that writes the tensor. ``argument`` is the tensor's index among that launch's arguments."""
    argument: int = -1
    shape: tuple[int, ...] = ()


class StoredLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a custom operator."""

    operator: str
    arguments: tuple[StoredArgument, ...]


class StoredProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launches of one or more graphs that are compiled together.

    The result of a graph is the last argument of its last launch.
    """

    graphs: tuple[tuple[StoredLaunch, ...], ...]
    """The launches of each graph."""
    proof: str
    """The digest of the results of the proof (``agent.stored_program.proof``), computed by MindSpore's graphs."""


def make_launches(launches: tuple[StoredLaunch, ...], memory: Mapping[str, Array]) -> RecordedLaunches:
    """Restores the stored launches of a graph in this process: calls each operator once, and returns the recorded
    calls for replays.

    ``memory`` maps the names in stored arguments to this process's arrays. The arrays of the step's inputs must
    describe a step without tokens, so that the calls compute nothing. Raises ProgramError if the operators refuse their
    arguments.
    """
    outputs: dict[tuple[int, int], Array] = {}

    def place(argument: StoredArgument, launch: int, number: int) -> Argument:
        if argument.memory:
            array = memory[argument.memory]
            return Argument(array.ctypes.data, array.shape, argument.type)
        key = (argument.launch, argument.argument)
        if key == (launch, number):
            outputs[key] = np.empty(int(np.prod(argument.shape)) * _SIZES[argument.type], np.uint8)
        return Argument(outputs[key].ctypes.data, argument.shape, argument.type)

    def run() -> tuple[tuple[Array, ...], tuple[int, ...]]:
        for number, launch in enumerate(launches):
            call_operator(launch.operator, [place(each, number, at) for at, each in enumerate(launch.arguments)])
        result = outputs[len(launches) - 1, len(launches[-1].arguments) - 1]
        return (result.view(np.int32),), (result.ctypes.data,)

    staying = [(array.ctypes.data, array.nbytes) for array in memory.values()]
    try:
        return record(run, staying)[1]
    except (IndexError, KeyError, KernelError, RecordingError) as problem:
        raise ProgramError(f"its launches cannot be made again ({problem})") from problem
