"""Reads the parameters of a model, one tensor at a time, into new memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent.weights.checkpoint import Checkpoint
from agent.weights.forms import LinearForm, LinearForms
from agent.weights.gguf_file import GGUFFile, find_gguf
from agent.weights.layout import WeightSpec
from agent.weights.packed import OUTPUT_LAYER, LinearPacker, Packing
from agent.weights.primitive import load_primitive
from agent.weights.seeded import SeededWeights
from agent.weights.source import WeightSource
from agent.weights.storage import Array, allocate
from llm_serving.model.quantization import checkpoint_quantization


def open_weights(
    folder: Path | None, specs: Sequence[WeightSpec], *, seed: int | None, ignorable: Iterable[str] = ()
) -> WeightSource:
    """Opens the source of a model's weights: random numbers if there is a ``seed``, else the model folder.

    Raises CheckpointError, before it reads any values, if the folder's files do not fit ``specs``.
    """
    if seed is not None:
        return SeededWeights(seed)
    assert folder is not None, "a config without a seed has a model folder"
    checkpoint = _open_folder(folder)
    try:
        checkpoint.check([part for spec in specs for part in spec.tensors], ignorable)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def load_weights(
    specs: Sequence[WeightSpec],
    source: WeightSource,
    dtype: str,
    report: Callable[[int, int], None],
    packing: Packing | None = None,
    forms: LinearForms | None = None,
) -> dict[str, Array]:
    """Returns every parameter by its name. ``report`` takes the number of parameters done and the total number.

    With ``packing``, the weights of linear layers are blobs of bytes for the kernels. Without ``packing``, parameters
    have the ``forms`` that the native primitives take. Floats are arrays of ``dtype``, dequantised if necessary.
    Integers come with their scales. Biases are separate, and the weight of an expert is [in, out] for grouped matrix
    products. Raises CheckpointError, or ConfigError if the stored weights cannot be converted to the format.
    """
    specs = list(specs) if packing is not None else _unpacked(specs)
    packer = None if packing is None else LinearPacker(packing, source, dtype)
    if packer is not None:
        for spec in specs:
            packer.check(spec)
    weights: dict[str, Array] = {}
    for done, spec in enumerate(specs):
        report(done, len(specs))
        form = _form_of(spec, forms)
        if packer is not None and spec.kind != "plain":
            weights[spec.parameter] = packer.pack(spec)
        elif not form.is_float:
            weights |= load_primitive(spec, form, source, dtype)
        else:
            weights[spec.parameter] = _load_plain(spec, source, "float32" if spec.float32 else dtype)
    report(len(specs), len(specs))
    return weights


def _unpacked(specs: Sequence[WeightSpec]) -> list[WeightSpec]:
    """Returns the parameters that a model without packed weights has: biases have their own parameters."""
    kept = [spec for spec in specs if not spec.packed_only]
    return [each for spec in kept for each in ((spec, spec.bias_spec()) if spec.bias else (spec,))]


def _form_of(spec: WeightSpec, forms: LinearForms | None) -> LinearForm:
    if forms is None or spec.kind == "plain":
        return LinearForm()
    if spec.float32:
        return LinearForm()
    return forms.output if spec.parameter == OUTPUT_LAYER else forms.experts if spec.experts else forms.layers


def _load_plain(spec: WeightSpec, source: WeightSource, dtype: str) -> Array:
    if spec.experts:
        return _load_experts(spec, source, dtype)
    array = allocate(spec.shape, dtype)
    row = 0
    for part in spec.parts:
        source.read_into(part.name, array[row : row + part.shape[0]], dtype)
        row += part.shape[0]
    array[row:] = 0
    return array


def _load_experts(spec: WeightSpec, source: WeightSource, dtype: str) -> Array:
    experts, rows, depth = spec.shape
    array = allocate((experts, depth, rows), dtype)
    for index in range(experts):
        array[index] = _load_plain(spec.expert(index), source, dtype).T
    return array


def _open_folder(folder: Path) -> Checkpoint | GGUFFile:
    gguf = find_gguf(folder)
    return Checkpoint(folder, checkpoint_quantization(folder)) if gguf is None else GGUFFile(gguf)
