"""Defines the common base of the readers of quantised checkpoint formats.

To add a format, write a ``Decoder`` and name it in ``agent.weights.checkpoint``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from agent.weights.cuts import TensorCut
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array, to_float32
from llm_serving.errors import CheckpointError
from llm_serving.model.quantization import Quantization

FLOAT_TYPES = ("F16", "BF16", "F32")
FLOAT_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""The names of float types, by their spelling in a safetensors file."""
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes a tensor of a checkpoint: name, allowed types and shapes, and whether it may be absent."""

    name: str
    types: tuple[str, ...]
    """The allowed types, spelled as in a safetensors file."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes that the tensor may have."""
    optional: bool = False


class StoredTensors:
    """Reads the stored tensors that represent one quantised weight, such as integers and scales.

    The names of these tensors are ``stem``, a point and ``end``. Methods take ``end``, for example ``qweight``.
    """

    def __init__(self, stem: str, read: Callable[[str], tuple[Array, str] | None]) -> None:
        self.stem = stem
        self._read = read
        self.first_group = 0
        """Index of the first group of inputs that the tensors contain. It is 0 unless only a part of the weight is
        read.
        """
        self.has_all_columns = True
        self.has_first_column = True
        self.weight_shape: tuple[int, ...] | None = None
        """Shape of the whole weight if only a part of it is read, otherwise None."""

    def of(self, stem: str) -> StoredTensors:
        """Returns a reader for the tensors of another weight, whose names begin with ``stem``."""
        return StoredTensors(stem, self._read)

    def array(self, end: str) -> Array:
        """Returns the tensor ``end`` as it is stored. The array is valid while the checkpoint is open."""
        found = self._read(f"{self.stem}.{end}")
        assert found is not None, "the checkpoint has been checked for required tensors"
        return found[0]

    def optional(self, end: str) -> Array | None:
        """Returns the tensor ``end`` as it is stored, or None if the checkpoint does not have it."""
        found = self._read(f"{self.stem}.{end}")
        return None if found is None else found[0]

    def floats(self, end: str) -> npt.NDArray[np.float32]:
        """Returns the tensor ``end`` as float32, without rounding. Raises CheckpointError if a value is not finite."""
        found = self._read(f"{self.stem}.{end}")
        assert found is not None, "the checkpoint has been checked for required tensors"
        values = np.array(to_float32(found[0], FLOAT_NAMES[found[1]]))
        if not np.isfinite(values).all():
            raise self.fail(end, "holds a value that is not finite")
        return values

    def fail(self, end: str, problem: str) -> CheckpointError:
        """Makes a CheckpointError about the tensor ``end``."""
        return CheckpointError(f"tensor {self.stem}.{end} {problem}")


Axis = Literal["out", "in", "group", "out_words", "in_words"]
"""The meaning of a tensor's axis: outputs, inputs, groups of inputs, or words that pack several outputs or inputs."""


class CutTensors(StoredTensors):
    """Reads the stored tensors of a part (``cut``) of a quantised weight. Returns views of the necessary ranges."""

    def __init__(self, whole: StoredTensors, cut: TensorCut, decoder: Decoder, count: Callable[[int], None]) -> None:
        super().__init__(whole.stem, self._read_cut)
        self._whole = whole
        self._cut = cut
        self._decoder = decoder
        self._count = count
        self.first_group = decoder_groups(decoder, cut).start or 0
        self.has_all_columns = cut.columns is None
        self.has_first_column = cut.columns is None or cut.columns.start == 0
        self.weight_shape = cut.whole

    def _read_cut(self, name: str) -> tuple[Array, str] | None:
        end = name.removeprefix(f"{self.stem}.")
        found = self._whole._read(name)
        if found is None:
            return None
        array = found[0]
        axes = self._decoder.axes.get(end, ())
        for axis, kind in enumerate(axes[: array.ndim]):
            array = array[(slice(None),) * axis + (self._range(kind, array.shape[axis], name),)]
        self._count(array.nbytes)
        return array, found[1]

    def _range(self, kind: Axis, size: int, name: str) -> slice:
        """Returns the range of a stored tensor's axis that contains this part of the weight.

        ``kind`` is the meaning of the axis, and ``size`` its length. An axis of size 1 is never divided.
        """
        if size == 1:
            return slice(None)
        if kind == "group":
            return decoder_groups(self._decoder, self._cut)
        span = self._cut.rows if kind.startswith("out") else self._cut.columns
        if span is None:
            return slice(None)
        whole = self._cut.whole[0 if kind.startswith("out") else 1]
        per_word = 1 if size == whole else self._decoder.per_word
        if span.start % per_word or (span.stop % per_word and span.stop != whole):
            raise CheckpointError(
                f"tensor {name}: values {span.start} to {span.stop} are not whole words of {per_word}; "
                "use another parallel_config.tensor_parallel"
            )
        return slice(span.start // per_word, -(-span.stop // per_word))


def decoder_groups(decoder: Decoder, cut: TensorCut) -> slice:
    """Returns the range of groups in the columns of ``cut``. The inputs of a group share a scale."""
    return cut.groups(decoder.scheme())


class Decoder(ABC):
    """Reads the tensors of one quantised format. A weight's ``stem`` is its name without ``.weight``."""

    axes: ClassVar[dict[str, tuple[Axis, ...]]]
    """The axes of the stored tensors, by the last part of their names. Other tensors are read whole."""
    marker: str
    """Last part of a tensor's name, for example ``qweight``. A weight is quantised if the checkpoint has a tensor with
    this ending instead of ``weight``.
    """

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization

    @property
    def per_word(self) -> int:
        """Number of integers that share a stored word. Most formats have words of 32 bits."""
        return 32 // self.quantization.bits

    def is_quantised(self, name: str, exists: Callable[[str], bool]) -> bool:
        """Returns True if the weight ``name`` is quantised.

        ``exists`` takes the name of a tensor and returns whether the checkpoint has it.
        """
        return exists(f"{stem_of(name)}.{self.marker}")

    def scheme(self) -> Scheme:
        """Returns the integer format and the groups of the checkpoint's quantised tensors."""
        return Scheme(self.quantization.format.name, self.quantization.group)

    def scheme_of(self, name: str) -> Scheme:
        """Returns the integer format and the groups of the quantised weight ``name``."""
        return self.scheme()

    def groups(self, part: WeightPart) -> int:
        """Returns the number of groups in a row of a weight. Each group of inputs has a scale.

        Raises CheckpointError if the row does not consist of whole groups.
        """
        depth, group = part.shape[1], self.quantization.group or part.shape[1]
        if depth % group:
            raise CheckpointError(f"tensor {part.name}: its {depth} inputs are not whole groups of {group}")
        return depth // group

    def words(self, part: WeightPart, count: int) -> int:
        """Returns the number of words that ``count`` integers fill.

        Raises CheckpointError if the integers do not fill the last word.
        """
        per_word = self.per_word
        if count % per_word:
            raise CheckpointError(f"tensor {part.name}: {count} values do not fill words of {per_word}")
        return count // per_word

    def other_tensors(
        self, names: Iterable[str], parts: Mapping[str, WeightPart], read: Callable[[str], tuple[Array, str] | None]
    ) -> set[str]:
        """Returns those of ``names`` that this format allows although the model has no tensors of these names.

        ``parts`` maps names to the model's tensors. Also reads these additional tensors, and raises CheckpointError if
        their values cannot be used.
        """
        return set()

    @abstractmethod
    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        """Returns the tensors that the checkpoint must or may contain for the weight ``part``."""

    @abstractmethod
    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        """Decodes the stored tensors of a weight. Raises CheckpointError if their values are not valid."""


def stem_of(name: str) -> str:
    """Removes the ending ``.weight`` from a tensor's name."""
    return name.removesuffix(_WEIGHT)


def check_stored(stored: StoredTensor, found_type: str, found_shape: tuple[int, ...]) -> None:
    """Raises CheckpointError unless a tensor has a type and a shape that ``stored`` allows.

    ``found_type`` and ``found_shape`` are the type and the shape of the tensor in the checkpoint.
    """
    if found_type not in stored.types:
        raise CheckpointError(
            f"tensor {stored.name} has type {found_type}; in this format it must be one of {', '.join(stored.types)}"
        )
    if found_shape not in stored.shapes:
        wanted = " or ".join(str(list(shape)) for shape in stored.shapes)
        raise CheckpointError(f"tensor {stored.name} has shape {list(found_shape)}; config.json requires {wanted}")


def check_zero(tensors: StoredTensors, end: str) -> None:
    """Raises CheckpointError if the optional tensor ``end``, such as a bias, exists and has a value other than zero."""
    array = tensors.optional(end)
    if array is not None and bool((array != 0).any()):
        raise tensors.fail(end, "is not zero, and linear layers of this model have no such tensor")


def uneven_groups(part: WeightPart, groups: int, tensors: StoredTensors, end: str) -> npt.NDArray[np.int32] | None:
    """Returns for each input the index of its group, int32 [in], or None if each group is a range of consecutive
    inputs.

    The stored tensor ``end`` has these indices. It may be missing, or have only -1 for a weight without groups. Raises
    CheckpointError if an index is not valid.
    """
    stored, depth = tensors.optional(end), part.shape[1]
    if stored is None or bool((stored == -1).all()):
        return None
    if np.array_equal(stored - tensors.first_group, np.arange(depth) // (depth // groups)):
        return None
    if not tensors.has_all_columns:
        raise tensors.fail(
            end,
            "is not in order (desc_act), so agents cannot divide the inputs; set parallel_config.tensor_parallel: 1",
        )
    if int(stored.min()) < 0 or int(stored.max()) >= groups:
        raise tensors.fail(end, f"names a group that does not exist; there are {groups} groups")
    return np.array(stored, np.int32)
