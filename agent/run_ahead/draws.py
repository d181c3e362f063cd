"""Lets the device choose tokens of sequences with a temperature, so that the next step can be launched ahead.

The host's sampler makes the final choice of each token. The device makes the same choice earlier, from the same logits
and random numbers, but its floats may round differently. So the host compares each token of the device with its own.
If they differ, ``agent.run_ahead.steps`` launches the step that used the device's token again, with the host's token.
Therefore text never depends on the arithmetic of a device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agent.kernels import uniform_numbers
from agent.run_ahead.odds import DrawOdds
from agent.sampler import decided_by_all, decided_by_candidates
from agent.scores import DeviceScores, Float32Array, Int32Array
from llm_serving.ipc.shm import StepSlot

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
_SMALL = np.float32(1e-30)
"""Takes the place of a ``top_p`` of 0, because the largest logit is kept in any case."""
_NO_TOP_K = 1e6
"""Takes the place of ``top_k`` in sequences without it. It is above the number of candidates."""


class DrawColumn(enum.IntEnum):
    """The columns of the array ``draws``, float32 [seqs, columns], by which a device chooses tokens.

    To add a column, add a member here, and write the column in ``draw_parameters``.
    """

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    """The parameter ``top_p``, or 2 if it is 1. With 2, rounded sums exclude no candidate."""
    MIN_P = 3
    NUMBER = 4
    """The sampler's random number for this token: at least 0 and below 1."""
    IS_DRAWN = 5
    """1 if the device chooses the token at random, 0 if the token is the one with the largest logit."""
    IS_WHOLE = 6
    """1 if the sequence has no ``top_k``, so that the token may be none of the candidates. Otherwise 0."""
    SHARE = 7
    """The part of the whole row's mass that ``top_p`` keeps at least: ``top_p``, at most 1."""


class StartedDraws(NamedTuple):
    """The sequences of a step whose tokens the device draws."""

    are_drawn: npt.NDArray[np.bool_]
    """[seqs]: whether the device draws the token. The host must then compare the token with its own."""
    are_whole: npt.NDArray[np.bool_]
    """[seqs]: whether the token may be none of the candidates, because the sequence has no ``top_k``."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens that were chosen in a step, by the sampler and by the device: both int32 [seqs]."""

    sampled: Int32Array
    """A negative number if the logits of the sequence are not finite."""
    drawn: Int32Array


DrawnLater = Callable[[], DrawnTokens]
"""Returns the tokens of a step that was sampled, as soon as they are known (``agent.run_ahead.last_tokens``)."""


class CheckedDraws(NamedTuple):
    """Counts the tokens that the device has drawn in a step, and with which the next step was launched."""

    num_draws: int = 0
    """Number of these tokens. Sequences without ``top_k`` do not count."""
    num_wrong: int = 0
    """Number of these tokens that the sampler has not chosen."""


def start_draws(scores: DeviceScores, slot: StepSlot, odds: DrawOdds) -> StartedDraws:
    """Starts the choice of tokens on the device, after ``find_candidates``. Returns which tokens the device draws.

    ``odds`` decides whether the device draws tokens of sequences without ``top_k``.
    """
    drawn, whole = decided_by_candidates(slot, scores.num_drawable), np.zeros(slot.num_seqs, np.bool_)
    if scores.num_drawable:
        whole = decided_by_all(slot)
        if whole.any() and odds.allow(int(whole.sum())):
            drawn |= whole
    if drawn.any():
        scores.draw(draw_parameters(slot, drawn))
    return StartedDraws(drawn, whole)


def draw_parameters(slot: StepSlot, drawn: npt.NDArray[np.bool_]) -> Float32Array:
    """Returns the parameters of each draw, float32 [seqs, columns]. ``drawn`` [seqs] selects the drawn sequences.

    Sequences that are not drawn get a temperature of 1.
    """
    seqs = slot.num_seqs
    given = {name: slot.arrays[name][:seqs] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    numbers = uniform_numbers(given["seed"], slot.arrays["sample_position"][:seqs])
    draws = np.empty((seqs, len(DrawColumn)), np.float32)
    draws[:, DrawColumn.TEMPERATURE] = np.where(drawn, given["temperature"], 1)
    draws[:, DrawColumn.TOP_K] = np.where(given["top_k"] > 0, given["top_k"], _NO_TOP_K)
    draws[:, DrawColumn.TOP_P] = np.where(given["top_p"] < 1, np.maximum(given["top_p"], _SMALL), 2)
    draws[:, DrawColumn.MIN_P] = given["min_p"]
    draws[:, DrawColumn.NUMBER] = np.minimum(numbers.astype(np.float32), _BELOW_ONE)
    draws[:, DrawColumn.IS_DRAWN] = drawn
    draws[:, DrawColumn.IS_WHOLE] = drawn & (given["top_k"] <= 0)
    draws[:, DrawColumn.SHARE] = np.minimum(given["top_p"], 1)
    return draws
