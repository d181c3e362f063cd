"""Reads the parameters of a model, one tensor at a time, into new memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from agent.weights.checkpoint import Checkpoint
from agent.weights.forms import LinearForm, LinearForms
from agent.weights.gguf.file import GGUFFile
from agent.weights.joined import JoinedSource, stored_parts
from agent.weights.layout import HeadRows, WeightSpec
from agent.weights.packed import OUTPUT_LAYER, LinearPacker, Packing
from agent.weights.primitive import load_primitive
from agent.weights.seeded import SeededWeights
from agent.weights.source import WeightSource
from agent.weights.stacked import StackedSource, holds_own_tensors, stacked_parts
from agent.weights.storage import STORAGE_DTYPES, Array, allocate, from_float32, to_float32
from llm_serving.gguf.place import find_gguf
from llm_serving.model.quantization import checkpoint_float8, checkpoint_quantization

_PIECE_ELEMENTS = 1 << 20
"""Approximate number of elements that are converted at a time."""
MAX_THREADS = 4
"""Maximum number of threads that read and convert weights. Each thread needs memory for the largest parameter of the
model.
"""


def open_weights(
    path: Path | None, specs: Sequence[WeightSpec], *, seed: int | None, ignorable: Iterable[str] = ()
) -> WeightSource:
    """Opens the source of a model's weights: random numbers if there is a ``seed``, else the model at ``path``.

    ``path`` is a model folder or a GGUF file. Raises CheckpointError if its tensors do not have the names and shapes in
    ``specs``. This check reads no values.
    """
    if seed is not None:
        return SeededWeights(seed)
    assert path is not None, "a config without a seed has a model folder or file"
    checkpoint = _open_model(path)
    parts = [part for spec in specs for part in spec.tensors]
    stored = stored_parts(parts)
    is_stacked = (
        isinstance(checkpoint, Checkpoint)
        and any(part.stacked is not None for part in parts)
        and not holds_own_tensors(stored, checkpoint.names())
    )
    try:
        checkpoint.check(stacked_parts(stored) if is_stacked else stored, ignorable)
    except BaseException:
        checkpoint.close()
        raise
    source = StackedSource(checkpoint, parts) if is_stacked else checkpoint
    places = {part.name: part.rows_of for part in parts if part.rows_of is not None}
    return JoinedSource(source, places) if places else source


def load_weights(
    specs: Sequence[WeightSpec],
    source: WeightSource,
    dtype: str,
    report: Callable[[int, int], None],
    packing: Packing | None = None,
    forms: LinearForms | None = None,
    keep: Callable[[str, Array], None] | None = None,
) -> dict[str, Array]:
    """Loads all parameters in ``specs``. Returns them by name.

    With ``packing``, each weight of a linear layer is packed into a blob of bytes for the kernels. Without ``packing``,
    ``forms`` states the layout and types that the native primitives take. Scales, offsets and biases are then separate
    parameters, and the weight of an expert is [in, out], for grouped matrix products.

    All other parameters are floats of ``dtype``, dequantised if necessary. Weights of expert routers are float32.
    ``report`` is called with the number of loaded parameters and the total. ``keep`` is called with the name and array
    of each parameter. Several threads read and convert, but the result does not depend on their number.

    Raises CheckpointError if a stored value is not valid. With ``packing``, raises ConfigError if stored integers
    cannot be packed to ``packing.weight_format``, or cannot be divided for ``parallel_config.sum_parts``.
    """
    holds_bias = forms is not None and forms.layers.holds_bias
    specs = list(specs) if packing is not None else _unpacked(specs, dtype, holds_bias=holds_bias)
    if packing is not None:
        packer = LinearPacker(packing, source, dtype)
        for spec in specs:
            packer.check(spec)
    own = threading.local()

    def load(spec: WeightSpec) -> dict[str, Array]:
        form = _form_of(spec, forms)
        if packing is not None and spec.kind != "plain":
            # A packer reuses its scratch memory, so threads cannot share a packer.
            if not hasattr(own, "packer"):
                own.packer = LinearPacker(packing, source, dtype)
            return {spec.parameter: own.packer.pack(spec)}
        if not form.is_float:
            return load_primitive(spec, form, source, dtype)
        return {spec.parameter: _load_plain(spec, source, "float32" if spec.float32 else dtype)}

    weights: dict[str, Array] = {}
    pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="load")
    try:
        for done, made in enumerate(pool.map(load, specs)):
            report(done, len(specs))
            for name, array in made.items():
                weights[name] = array
                if keep is not None:
                    keep(name, array)
    finally:
        pool.shutdown(cancel_futures=True)
    report(len(specs), len(specs))
    return weights


def _unpacked(specs: Sequence[WeightSpec], dtype: str, *, holds_bias: bool) -> list[WeightSpec]:
    """Returns the parameters of a model whose weights are not packed.

    Each bias is a separate parameter. With ``holds_bias``, the result has no biases: the checkpoint already includes
    them in the offsets that layers add to their integer sums.
    """
    kept = [spec for spec in specs if not spec.packed_only]
    biased = [bool(spec.bias) and not holds_bias for spec in kept]
    return [
        each
        for spec, is_biased in zip(kept, biased, strict=True)
        for each in ((spec, spec.bias_spec(dtype)) if is_biased else (spec,))
    ]


def _form_of(spec: WeightSpec, forms: LinearForms | None) -> LinearForm:
    if forms is None or spec.kind == "plain":
        return LinearForm()
    if spec.float32 or spec.head_rows is not None:
        return LinearForm()
    return forms.output if spec.parameter == OUTPUT_LAYER else forms.experts if spec.experts else forms.layers


def _load_plain(spec: WeightSpec, source: WeightSource, dtype: str) -> Array:
    if spec.experts and len(spec.shape) == 2:  # the experts' biases [experts, out]
        return _load_plain(replace(spec, experts=0), source, dtype).reshape(spec.shape)
    if spec.experts:
        return _load_experts(spec, source, dtype)
    if spec.head_rows is not None:
        return _load_heads(spec, spec.head_rows, source, dtype)
    array = allocate(spec.shape, dtype)
    row = 0
    for part in spec.parts:
        source.read_into(part.name, array[row : row + part.shape[0]], dtype)
        row += part.shape[0]
    array[row:] = 0
    if (spec.offset, spec.factor) != (0.0, 1.0):
        _rescale(array[:row], dtype, spec.offset, spec.factor)
    return array


def _rescale(array: Array, dtype: str, offset: float, factor: float) -> None:
    """Replaces each value x by (x + ``offset``) x ``factor``, in pieces of rows to save memory.

    ``factor`` is first rounded to ``dtype``, because the original models multiply activations by the rounded factor.
    """
    rounded = to_float32(from_float32(np.array([factor], np.float32), dtype), dtype)[0]
    step = max(1, _PIECE_ELEMENTS // max(1, array[:1].size))
    for row in range(0, len(array), step):
        piece = to_float32(array[row : row + step], dtype)
        array[row : row + step] = from_float32((piece + np.float32(offset)) * rounded, dtype)


def _load_experts(spec: WeightSpec, source: WeightSource, dtype: str) -> Array:
    experts, rows, depth = spec.shape
    array = allocate((experts, depth, rows), dtype)
    for index in range(experts):
        array[index] = _load_plain(spec.expert(index), source, dtype).T
    return array


def _load_heads(spec: WeightSpec, heads: HeadRows, source: WeightSource, dtype: str) -> Array:
    """Loads a weight of floats [heads, in, out], which has one matrix for each head."""
    (part,) = spec.parts
    stored = np.empty(part.shape, STORAGE_DTYPES[dtype])
    source.read_into(part.name, stored, dtype)
    rows = stored.reshape(heads.heads, heads.stride, -1)[:, heads.rows.slice]
    matrices = rows if heads.transposed else rows.swapaxes(1, 2)
    array = allocate(matrices.shape, dtype)
    array[...] = matrices
    return array


def _open_model(path: Path) -> Checkpoint | GGUFFile:
    gguf = find_gguf(path)
    if gguf is not None:
        return GGUFFile(gguf)
    return Checkpoint(path, checkpoint_quantization(path), checkpoint_float8(path))
