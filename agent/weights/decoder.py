"""What the readers of quantised checkpoint formats have in common: which tensors stand for a weight, and their sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
_FLOAT_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must hold, or may."""

    name: str
    types: tuple[str, ...]
    """As in a safetensors file."""
    shapes: tuple[tuple[int, ...], ...]
    """Any of them."""
    optional: bool = False


class StoredTensors:
    """The tensors that stand for one weight, by the end of their name. What is optional may be absent."""

    def __init__(self, stem: str, read: Callable[[str], tuple[Array, str] | None]) -> None:
        self.stem = stem
        self._read = read
        self.first_group = 0
        """The number that the first group of inputs has in the whole weight."""
        self.has_all_columns = True
        self.weight_shape: tuple[int, ...] | None = None
        """Of the whole weight, where this is a part of it."""

    def array(self, end: str) -> Array:
        """As it is stored; valid as long as the checkpoint is open."""
        found = self._read(f"{self.stem}.{end}")
        assert found is not None, "a compulsory tensor has been checked to be there"
        return found[0]

    def optional(self, end: str) -> Array | None:
        found = self._read(f"{self.stem}.{end}")
        return None if found is None else found[0]

    def floats(self, end: str) -> npt.NDArray[np.float32]:
        """As float32, exactly. Raises CheckpointError when a value is not finite."""
        found = self._read(f"{self.stem}.{end}")
        assert found is not None, "a compulsory tensor has been checked to be there"
        values = np.array(to_float32(found[0], _FLOAT_NAMES[found[1]]))
        if not np.isfinite(values).all():
            raise self.fail(end, "holds a value that is not finite")
        return values

    def fail(self, end: str, problem: str) -> CheckpointError:
        """The error to raise about one of the tensors."""
        return CheckpointError(f"tensor {self.stem}.{end} {problem}")


Axis = Literal["out", "in", "group", "out_words", "in_words"]
"""What an axis of a stored tensor counts: outputs, inputs, groups of inputs, or int32 words of outputs or inputs."""


class CutTensors(StoredTensors):
    """The part of these tensors that stands for a part of the weight. Views, so that the rest is not read."""

    def __init__(self, whole: StoredTensors, cut: TensorCut, decoder: Decoder, count: Callable[[int], None]) -> None:
        super().__init__(whole.stem, self._read_cut)
        self._whole = whole
        self._cut = cut
        self._decoder = decoder
        self._count = count
        self.first_group = decoder_groups(decoder, cut).start or 0
        self.has_all_columns = cut.columns is None
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
        """Of an axis of ``size``. One of size 1 is the same for all."""
        if size == 1:
            return slice(None)
        if kind == "group":
            return decoder_groups(self._decoder, self._cut)
        span = self._cut.rows if kind.startswith("out") else self._cut.columns
        if span is None:
            return slice(None)
        whole = self._cut.whole[0 if kind.startswith("out") else 1]
        per_word = 1 if size == whole else 32 // self._decoder.quantization.bits
        if span.start % per_word or (span.stop % per_word and span.stop != whole):
            raise CheckpointError(
                f"tensor {name}: values {span.start} to {span.stop} are not whole words of {per_word}; "
                "use another number of agents (parallel_config.tensor_parallel)"
            )
        return slice(span.start // per_word, -(-span.stop // per_word))


def decoder_groups(decoder: Decoder, cut: TensorCut) -> slice:
    """The groups of a part's columns."""
    return cut.groups(decoder.scheme())


class Decoder(ABC):
    """Reads the tensors of one format. ``stem`` is a weight's name without ``.weight``."""

    axes: ClassVar[dict[str, tuple[Axis, ...]]]
    """Of the stored tensors, by the end of their name; what is not there is read whole."""
    marker: str
    """End of the name of a tensor that only a quantised weight has."""

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization

    def scheme(self) -> Scheme:
        """Of every quantised tensor of the checkpoint."""
        return Scheme(self.quantization.format.name, self.quantization.group)

    def groups(self, part: WeightPart) -> int:
        """Scales of a row. Raises CheckpointError when groups do not divide the row."""
        depth, group = part.shape[1], self.quantization.group or part.shape[1]
        if depth % group:
            raise CheckpointError(f"tensor {part.name}: its {depth} inputs are not whole groups of {group}")
        return depth // group

    def words(self, part: WeightPart, count: int) -> int:
        """int32 words that hold ``count`` integers. Raises CheckpointError when they do not fill them."""
        per_word = 32 // self.quantization.bits
        if count % per_word:
            raise CheckpointError(f"tensor {part.name}: {count} values do not fill words of {per_word}")
        return count // per_word

    @abstractmethod
    def stored(self, part: WeightPart) -> tuple[StoredTensor, ...]:
        """What stands for the weight."""

    @abstractmethod
    def decode(self, part: WeightPart, tensors: StoredTensors) -> QuantizedTensor:
        """Raises CheckpointError, naming the tensor, when its values cannot be."""


def stem_of(name: str) -> str:
    """``model.layers.0.mlp.up_proj`` of ``model.layers.0.mlp.up_proj.weight``."""
    return name.removesuffix(_WEIGHT)


def check_stored(stored: StoredTensor, found_type: str, found_shape: tuple[int, ...]) -> None:
    """Raises CheckpointError naming the tensor unless type and shape are as the format says."""
    if found_type not in stored.types:
        raise CheckpointError(
            f"tensor {stored.name} has type {found_type}; in this format it must be one of {', '.join(stored.types)}"
        )
    if found_shape not in stored.shapes:
        wanted = " or ".join(str(list(shape)) for shape in stored.shapes)
        raise CheckpointError(f"tensor {stored.name} has shape {list(found_shape)}; config.json makes it {wanted}")


def check_zero(tensors: StoredTensors, end: str) -> None:
    """Raises CheckpointError when an optional tensor (a bias, say) is there and does anything."""
    array = tensors.optional(end)
    if array is not None and bool((array != 0).any()):
        raise tensors.fail(end, "is not zero, and the linear layers have no such thing")


def uneven_groups(part: WeightPart, groups: int, tensors: StoredTensors, end: str) -> npt.NDArray[np.int32] | None:
    """The group of each input, where that is more than consecutive inputs; some writers say -1 for nothing."""
    stored, depth = tensors.optional(end), part.shape[1]
    if stored is None or bool((stored == -1).all()):
        return None
    if np.array_equal(stored - tensors.first_group, np.arange(depth) // (depth // groups)):
        return None
    if not tensors.has_all_columns:
        raise tensors.fail(
            end,
            "is not in order (desc_act): its inputs cannot be divided; set parallel_config.tensor_parallel: 1",
        )
    if int(stored.min()) < 0 or int(stored.max()) >= groups:
        raise tensors.fail(end, f"names a group that is not there; there are {groups}")
    return np.array(stored, np.int32)
