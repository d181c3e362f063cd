"""GPTQ (Frantar et al. 2023): rounds a weight matrix column by column. Later columns make up for a column's error.

A linear layer has the inputs X [samples, in]. H is X^T X. If a row w of the weight is rounded to q, the squared error
of the outputs is (w - q) H (w - q)^T. Columns are processed in the order of their values on the diagonal of H, the
largest first. A quantisation group nevertheless consists of consecutive inputs, because its scales are calculated
before the rounding (GPTQ's ``static_groups``). The served model therefore needs no permutation of the inputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tools.quantization.rounding import Float32Array, Quantised, Settings, fit, round_to

Float64Array = NDArray[np.float64]
DAMPING = 0.01
"""Fraction of the mean of H's diagonal that is added to the diagonal, so that H can be inverted."""
_BLOCK = 128
"""Number of columns in a block. Columns after a block are corrected once, for the errors of the whole block."""
_SHRINKS = tuple(np.float32(1.0 - step / 40) for step in range(17))
"""Candidates for the range that a group's integers cover, as fractions of the range of all weights of the group."""


class Hessian:
    """Sums X^T X over the inputs of a layer, batch by batch."""

    def __init__(self, depth: int) -> None:
        self.matrix: Float64Array = np.zeros((depth, depth))

    def add(self, inputs: Float32Array) -> None:
        """Adds the inputs [samples, in] of one batch to the sum."""
        self.matrix += inputs.T @ inputs


def gptq(weight: Float32Array, hessian: Float64Array, settings: Settings) -> Quantised:
    """Rounds ``weight`` [out, in] so that the outputs of the linear layer change little.

    ``hessian`` [in, in] is the sum X^T X over the layer's calibration inputs.
    """
    rows, depth = weight.shape
    group = settings.group_of(depth)
    diagonal = hessian.diagonal()
    scales, zeros = _search(weight.reshape(rows, -1, group), diagonal.reshape(-1, group), settings)
    order = np.argsort(-diagonal, kind="stable")
    factor = _inverse_factor(hessian[np.ix_(order, order)])
    work = np.where(diagonal == 0, np.float32(0), weight)[:, order]  # an input that is always 0 gets the weight 0
    q = np.empty((rows, depth), np.uint8)
    for begin in range(0, depth, _BLOCK):
        end = min(begin + _BLOCK, depth)
        block, errors = work[:, begin:end], np.empty((rows, end - begin), np.float32)
        for i in range(end - begin):
            column, g = order[begin + i], order[begin + i] // group
            rounded = round_to(block[:, i], scales[:, g], zeros[:, g], settings)
            q[:, column] = rounded
            errors[:, i] = (block[:, i] - (rounded - zeros[:, g]) * scales[:, g]) / factor[begin + i, begin + i]
            block[:, i + 1 :] -= np.outer(errors[:, i], factor[begin + i, begin + i + 1 : end])
        work[:, end:] -= errors @ factor[begin:end, end:]
    return Quantised(q, scales, zeros.astype(np.uint8))


def _inverse_factor(hessian: Float64Array) -> Float32Array:
    """Returns the upper triangular U with U^T U = (H + damping)^-1.

    Row i of U states how an error in column i must be corrected in the later columns.
    """
    damped = hessian + np.eye(len(hessian)) * (DAMPING * max(float(hessian.diagonal().mean()), 1e-12))
    inverse = np.linalg.inv(damped)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)


def _search(groups: Float32Array, diagonal: Float64Array, settings: Settings) -> tuple[Float32Array, Float32Array]:
    """Returns scales and zero points of ``groups`` [out, groups, g].

    Each group has g weights. The function tries the ranges of ``_SHRINKS`` and chooses the range with the smallest
    squared error, weighted by ``diagonal`` [groups, g]. A smaller range clips the largest weights of the group, but can
    represent the other weights more exactly.
    """
    weights = diagonal.astype(np.float32)[None]
    best = np.full(groups.shape[:2], np.inf, np.float32)
    scales, zeros = np.empty_like(best), np.empty_like(best)
    for shrink in _SHRINKS:
        trial, zero = fit(groups * shrink, settings)
        rounded = round_to(groups, trial[:, :, None], zero[:, :, None], settings)
        difference = (rounded - zero[:, :, None]) * trial[:, :, None] - groups
        error = (difference * difference * weights).sum(axis=2)
        better = error < best
        best[better], scales[better], zeros[better] = error[better], trial[better], zero[better]
    return scales, zeros
