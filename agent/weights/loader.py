"""Read a model's parameters, one tensor at a time, into memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from agent.weights.checkpoint import Checkpoint
from agent.weights.layout import WeightSpec
from agent.weights.seeded import SeededWeights
from agent.weights.storage import Array, allocate


class WeightSource(Protocol):
    """Gives tensors by their Hugging Face name."""

    def read_into(self, name: str, out: Array, dtype: str) -> None:
        """Fill ``out``, a contiguous array that stores ``dtype``, with the tensor. Raises CheckpointError."""

    def close(self) -> None:
        """Give back what reading needed."""


def open_weights(
    folder: Path | None, specs: Sequence[WeightSpec], *, seed: int | None, ignorable: Iterable[str] = ()
) -> WeightSource:
    """A source of the tensors of ``specs``: random ones if there is a ``seed``, else those of the folder.

    Raises CheckpointError, before anything large is read, when the folder's files are not what ``specs`` say.
    """
    if seed is not None:
        return SeededWeights(seed)
    assert folder is not None, "a config without a seed has a model folder"
    checkpoint = Checkpoint(folder)
    try:
        checkpoint.check([part for spec in specs for part in spec.parts], ignorable)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def load_weights(
    specs: Sequence[WeightSpec], source: WeightSource, dtype: str, report: Callable[[int, int], None]
) -> dict[str, Array]:
    """Every parameter by its name, in ``dtype``. ``report`` gets (parameters done, of how many)."""
    weights: dict[str, Array] = {}
    for done, spec in enumerate(specs):
        report(done, len(specs))
        weights[spec.parameter] = _load_one(spec, source, dtype)
    report(len(specs), len(specs))
    return weights


def _load_one(spec: WeightSpec, source: WeightSource, dtype: str) -> Array:
    array = allocate(spec.shape, dtype)
    row = 0
    for part in spec.parts:
        source.read_into(part.name, array[row : row + part.shape[0]], dtype)
        row += part.shape[0]
    return array
