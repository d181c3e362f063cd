"""Finds the launches of a fused graph. Runs its Cells in Python, with operators that only record their arguments.

MindSpore compiles the same Cells, so its graph launches the same operators. Imports mindspore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, nn, ops

from agent.stored_program.program import ProgramError, StoredArgument, StoredLaunch
from agent.weights.storage import Array


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a launch, which a later launch may take as an input."""

    launch: int
    argument: int
    """The index among the launch's arguments: the inputs come first, then the outputs."""
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True, slots=True)
class TracedLaunch:
    """One call of a custom operator, with its inputs and outputs."""

    operator: str
    inputs: tuple[Tensor | Output, ...]
    outputs: tuple[Output, ...]


def trace_launches(cell: nn.Cell, inputs: Sequence[Tensor]) -> list[TracedLaunch]:
    """Runs ``cell`` with ``inputs``. The operators compute nothing. Returns the calls of operators, in their order.

    All operators of the cell must come from ``agent.backends.cpu.ops.custom_operator``.
    """
    found: list[TracedLaunch] = []

    def note(operator: Any, *arguments: Tensor | Output) -> Output | tuple[Output, ...]:
        shapes, types = operator.out_shape(), operator.out_dtype()
        is_single = not isinstance(types, tuple)
        places = zip([shapes] if is_single else shapes, [types] if is_single else types, strict=True)
        outputs = tuple(
            Output(len(found), len(arguments) + number, tuple(shape), type_name(dtype))
            for number, (shape, dtype) in enumerate(places)
        )
        found.append(TracedLaunch(operator.func.rpartition(":")[2], arguments, outputs))
        return outputs[0] if is_single else outputs

    def construct(inner: nn.Cell, *arguments: Any) -> Any:
        return inner.construct(*arguments)

    with _replaced_call(ops.Custom, note), _replaced_call(nn.Cell, construct):
        cell(*inputs)
    return found


def stored_launches(traced: Sequence[TracedLaunch], memory: Mapping[str, Array]) -> tuple[StoredLaunch, ...]:
    """Converts traced launches to the form that is stored in a file: replaces each tensor by the name of its memory.

    ``memory`` maps names to arrays. Raises ProgramError if an input is not in one of these arrays.
    """
    names = {array.ctypes.data: name for name, array in memory.items() if array.nbytes}

    def named(argument: Tensor | Output, operator: str) -> StoredArgument:
        if isinstance(argument, Output):
            return StoredArgument(
                argument.type, launch=argument.launch, argument=argument.argument, shape=argument.shape
            )
        name = names.get(argument.data_ptr())
        if name is None or memory[name].shape != tuple(argument.shape):
            raise ProgramError(
                f"{operator} reads memory without a name, of shape {list(argument.shape)}"
                if name is None
                else f"{operator} reads {name} of shape {list(memory[name].shape)} as {list(argument.shape)}"
            )
        return StoredArgument(type_name(argument.dtype), memory=name)

    return tuple(
        StoredLaunch(each.operator, tuple(named(argument, each.operator) for argument in (*each.inputs, *each.outputs)))
        for each in traced
    )


def type_name(dtype: Any) -> str:
    """Returns the name of a MindSpore type as the operators expect it, for example ``float32``."""
    return str(dtype).lower()


@contextmanager
def _replaced_call(kind: type, call: Any) -> Iterator[None]:
    """Replaces the method ``__call__`` of the class ``kind`` by ``call`` until the end of the ``with`` block."""
    own = vars(kind).get("__call__")
    kind.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own  # type: ignore[method-assign]
