"""Reads the weights of one GGUF file (llama.cpp's format). ``agent.weights.gguf.blocks`` converts quantised types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agent.weights.cuts import TensorCut, copy_cut
from agent.weights.gguf.blocks import scheme_of, to_floats, to_integers
from agent.weights.gguf.names import (
    IGNORED,
    OUTPUT,
    adds_one,
    joined_with,
    name_table,
    predicts_further,
    row_heads,
)
from agent.weights.gguf.recipes import Floats, Recipe
from agent.weights.layout import WeightPart
from agent.weights.quantized import QuantizedTensor, Scheme
from agent.weights.storage import Array, convert_into, from_float32, to_float32
from agent.weights.tensor_files import listed
from llm_serving.errors import CheckpointError
from llm_serving.gguf.header import TensorEntry, read_header
from llm_serving.model.quantization import GGUF_FLOATS

_PIECE_ELEMENTS = 1 << 20
"""Approximate number of elements that are read at a time."""


class GGUFFile:
    """A WeightSource that maps one GGUF file. Callers name tensors by their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        self._place = name_table(self._header)
        self._data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")

    def check(self, expected: Sequence[WeightPart], ignorable: Iterable[str] = ()) -> None:
        """Raises CheckpointError unless the file has exactly the ``expected`` tensors with their shapes."""
        tensors = self._header.tensors
        places = {part.name: self._place(part.name).names for part in expected}
        # All experts of a layer are in one tensor of the file. The error lists a missing tensor only once, with the
        # name of its first expert.
        missing: dict[str, str] = {}
        for theirs, names in places.items():
            for name in names:
                if name not in tensors:
                    missing.setdefault(name, f"{name} ({theirs})")
        if missing:
            raise CheckpointError(f"{self.path}: {listed(list(missing.values()))} missing from the weights")
        known = {*chain.from_iterable(places.values()), *IGNORED}
        known |= {OUTPUT} if "lm_head.weight" in tuple(ignorable) else set()
        unexpected = [name for name in tensors if name not in known and not predicts_further(self._header, name)]
        if unexpected:
            raise CheckpointError(f"{self.path}: {listed(unexpected)} in the weights but not in a model of its sizes")
        for part in expected:
            self._check_shape(part)
            row_heads(self._header, part)

    def scheme(self, part: WeightPart) -> Scheme | None:
        """Returns the integer format in which a tensor is read, or None if the tensor is read as floats.

        The tensors that this project joins to one weight, such as q, k and v, are all read in the same format.
        """
        tensors, place = self._header.tensors, self._place(part.name)
        if place.recipe is not None and place.recipe.combine is not None:
            return None
        names = {name for each in place.names for name in joined_with(each)}
        return scheme_of({tensors[name].type.name for name in names if name in tensors})

    def float_dtype(self, name: str) -> str | None:
        """Returns the type of a tensor that is read as floats. A tensor of a quantised type is read as float32."""
        kinds = {self._header.tensors[each].type.name for each in self._place(name).names}
        return GGUF_FLOATS.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"

    def read_quantised(self, part: WeightPart, cut: TensorCut | None = None) -> QuantizedTensor:
        """Reads a tensor that has a ``scheme``, or one part of the tensor, into new memory.

        Raises CheckpointError if a scale is not finite.
        """
        if cut is not None:
            return cut.of_quantised(self.read_quantised(WeightPart(part.name, cut.whole)))
        place, scheme = self._place(part.name), self.scheme(part)
        assert scheme is not None, "only tensors with a scheme are read as integers"
        try:
            if place.recipe is not None:
                return self._integers_of(place.recipe, scheme)
            return to_integers(self._rows(part)[self._row_order(part)], self._entry(part.name).type, scheme)
        except CheckpointError as reason:
            raise CheckpointError(f"{self.path}: tensor {', '.join(place.names)}: {reason}") from reason

    def read_into(self, name: str, out: Array, dtype: str, cut: TensorCut | None = None) -> None:
        """Copies a tensor, or one part of the tensor, to ``out`` as elements of ``dtype``.

        Raises CheckpointError if a value does not fit ``dtype``.
        """
        part, place = WeightPart(name, out.shape if cut is None else cut.whole), self._place(name)
        try:
            if place.recipe is not None:
                floats = self._floats_of(place.recipe).reshape(part.shape)
                out[...] = from_float32(np.ascontiguousarray(floats if cut is None else cut.of(floats)), dtype)
            else:
                self._read_stored(part, self._entry(name), out, dtype, cut)
        except (OverflowError, CheckpointError) as reason:
            advice = "; use model_config.model_dtype bfloat16 or float32" if isinstance(reason, OverflowError) else ""
            raise CheckpointError(f"{self.path}: tensor {', '.join(place.names)}: {reason}{advice}") from reason

    def close(self) -> None:
        """Releases the file. The file stays mapped until the last view of a tensor is deleted."""
        self._data = np.empty(0, np.uint8)

    def _entry(self, name: str) -> TensorEntry:
        return self._header.tensors[self._place(name).name]

    def _bytes(self, part: WeightPart) -> npt.NDArray[np.uint8]:
        """Returns the stored bytes of a tensor. For an expert, returns its part of the tensor that has all experts."""
        entry, place = self._entry(part.name), self._place(part.name)
        data = self._data[entry.begin : entry.begin + entry.size]
        if place.expert is None:
            return data
        own: npt.NDArray[np.uint8] = data.reshape(entry.shape[0], -1)[place.expert]
        return own if place.half is None else own.reshape(2, -1)[place.half]

    def _rows(self, part: WeightPart) -> npt.NDArray[np.uint8]:
        """Returns the stored bytes of a matrix, uint8 [rows, bytes of a row]."""
        return self._bytes(part).reshape(part.shape[0], -1)

    def _row_order(self, part: WeightPart) -> Any:
        """Returns, for each row of a tensor in Hugging Face's order, its row number in the file."""
        heads = row_heads(self._header, part)
        if heads is None:
            return slice(None)
        return np.arange(part.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _read_stored(self, part: WeightPart, entry: TensorEntry, out: Array, dtype: str, cut: TensorCut | None) -> None:
        """Copies a tensor that needs no ``Recipe``, and undoes two changes by llama.cpp's converter.

        The converter reorders the rows of queries and keys, and adds 1 to the weights of some norms.
        """
        if entry.type.name in GGUF_FLOATS:
            self._copy_floats(part, entry, out, dtype, cut)
        else:
            self._dequantise(part, entry, out, dtype, cut)
        if adds_one(self._header, entry):
            out[:] = from_float32(to_float32(out, dtype) - np.float32(1), dtype)

    def _integers_of(self, recipe: Recipe, scheme: Scheme) -> QuantizedTensor:
        """Makes a tensor from the integers of the file's tensors, as ``recipe`` describes."""
        entries = [self._header.tensors[name] for name in recipe.names]
        return recipe.of_integers([to_integers(self._stored_rows(each), each.type, scheme) for each in entries])

    def _floats_of(self, recipe: Recipe) -> Floats:
        """Makes a tensor from the floats of the file's tensors, as ``recipe`` describes."""
        entries = [self._header.tensors[name] for name in recipe.names]
        tensors = [
            to_floats(self._stored_rows(each), each.type).reshape(shape)
            for each, shape in zip(entries, recipe.shapes, strict=True)
        ]
        return recipe.of_floats(tensors)

    def _stored_rows(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """Returns the stored bytes of a tensor, uint8 [rows, bytes of a row]."""
        rows = math.prod(entry.shape[:-1])
        return self._data[entry.begin : entry.begin + entry.size].reshape(rows, -1)

    def _copy_floats(self, part: WeightPart, entry: TensorEntry, out: Array, dtype: str, cut: TensorCut | None) -> None:
        stored = GGUF_FLOATS[entry.type.name]
        form = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[stored]
        floats = self._bytes(part).view(form).reshape(part.shape)[self._row_order(part)]
        if cut is None:
            convert_into(floats, stored, out, dtype)
        else:
            copy_cut(floats, stored, cut, out, dtype)

    def _dequantise(self, part: WeightPart, entry: TensorEntry, out: Array, dtype: str, cut: TensorCut | None) -> None:
        """Dequantises a matrix into ``out`` as elements of ``dtype``, in pieces of several rows to save memory."""
        first = 0 if cut is None else cut.rows.start
        columns = slice(None) if cut is None or cut.columns is None else cut.columns.slice
        stored, order = self._rows(part), self._row_order(part)
        step = max(1, _PIECE_ELEMENTS // part.shape[1])
        for begin in range(0, len(out), step):
            end = min(begin + step, len(out))
            wanted = slice(first + begin, first + end)
            rows = stored[wanted] if isinstance(order, slice) else stored[order[wanted]]
            out[begin:end] = from_float32(np.ascontiguousarray(to_floats(rows, entry.type)[:, columns]), dtype)

    def _check_shape(self, part: WeightPart) -> None:
        place = self._place(part.name)
        if place.recipe is not None:
            self._check_recipe(part, place.recipe)
            return
        entry = self._entry(part.name)
        shape = entry.shape if place.expert is None else entry.shape[1:]
        wanted = part.shape if place.half is None else (2 * part.shape[0], *part.shape[1:])
        is_beyond = place.expert is not None and place.expert >= entry.shape[0]
        if _significant(shape) != _significant(wanted) or is_beyond:
            raise CheckpointError(
                f"{self.path}: tensor {entry.name} has shape {list(entry.shape)}; the model requires "
                f"{list(wanted)}{'' if place.expert is None else ' for each expert'}"
            )
        self._check_vector(entry, part.shape)

    def _check_recipe(self, part: WeightPart, recipe: Recipe) -> None:
        """Raises CheckpointError unless the file's tensors have the recipe's shapes and as many values as ``part``."""
        for name, shape in zip(recipe.names, recipe.shapes, strict=True):
            entry = self._header.tensors[name]
            if _significant(entry.shape) != _significant(shape):
                raise CheckpointError(
                    f"{self.path}: tensor {name} has shape {list(entry.shape)}; the model requires {list(shape)}"
                )
            self._check_vector(entry, shape)
        if sum(map(math.prod, recipe.shapes)) != math.prod(part.shape):
            raise CheckpointError(
                f"{self.path}: tensor {', '.join(recipe.names)}: the sizes in the metadata do not agree with each other"
            )

    def _check_vector(self, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        if entry.type.name not in GGUF_FLOATS and len(shape) == 1:
            raise CheckpointError(
                f"{self.path}: tensor {entry.name} has type {entry.type.name}; a vector must have one of "
                f"{', '.join(GGUF_FLOATS)}"
            )


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without its leading dimensions of size 1. llama.cpp does not store these dimensions."""
    first = next((index for index, size in enumerate(shape) if size != 1), len(shape) - 1)
    return shape[first:]
