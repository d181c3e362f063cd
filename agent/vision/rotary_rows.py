"""Computes rotary positions with three dimensions: time, row and column (M-RoPE, arXiv:2409.12191, section 2.1).

A text token has the same number in all three dimensions. All tokens of an image have the same time. Their other two
numbers are this time plus the row, and this time plus the column. The number of the first text token after an image is
the largest number in the positions of the image, plus one. So its rotary position is less than its position in the
sequence. The difference is the token's shift, which the server sends with each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from agent.backends.base import OpTable
from agent.layers.rotary import rotary_tables
from agent.step_inputs import NUM_ROTARY_DIMENSIONS, Int32Array, StepInputs, check_range
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tiles import StepTile, read_tiles


class RotaryPositions(ABC):
    """Computes the rotary positions of the tokens of each step, and gives them to the graph."""

    def __init__(self, config: Config) -> None:
        self._num_positions = config.max_model_len
        assert config.shape.vision is not None, "only images have positions with three dimensions"
        self._row_edge = config.shape.vision.row_edge

    def fill(self, slot: StepSlot, inputs: StepInputs) -> None:
        """Gives the graph the rotary positions of a step.

        The tiles of ``slot`` must have been checked before, by ``ImageRows`` or by the first stage of a pipeline.
        Raises ProtocolError if a position is not valid.
        """
        positions = self._shifted(slot, inputs)
        self._take_text(inputs, positions)
        for tile in read_tiles(slot.tiles, slot.num_tiles):
            self._take_tile(inputs, tile.token, self._positions_of(tile, int(positions[tile.token]) - tile.first))

    @abstractmethod
    def refresh(self, inputs: StepInputs) -> None:
        """Gives the graph the rotary positions of ``inputs`` again, before the row check repeats a part of a step.

        ``inputs`` has some sequences of the step that was last passed to ``fill``. This step had no images.
        """

    @abstractmethod
    def _take_text(self, inputs: StepInputs, positions: Int32Array) -> None:
        """Gives the graph ``positions`` [tokens]: the rotary positions that all tokens would have if they were text."""

    @abstractmethod
    def _take_tile(self, inputs: StepInputs, token: int, positions: Int32Array) -> None:
        """Gives the graph ``positions`` [rows of a tile, 3] for the tokens of a tile, which begin at index ``token``.
        """

    def _shifted(self, slot: StepSlot, inputs: StepInputs) -> Int32Array:
        """Returns the rotary positions that all tokens would have if they were text.

        Raises ProtocolError if a rotary position would be negative.
        """
        shifts = slot.position_shifts[: inputs.positions.size]
        check_range("position_shifts", shifts, 0, self._num_positions)
        if (shifts > inputs.positions).any():
            raise ProtocolError("a step's position_shifts holds a number above the position of its token")
        shifted: Int32Array = inputs.positions - shifts
        return shifted

    def _positions_of(self, tile: StepTile, time: int) -> Int32Array:
        """Returns the rotary positions of a tile's tokens, [rows, 3]. ``time`` is the rotary position of its image.

        Raises ProtocolError if a position exceeds the tables.
        """
        numbers = np.arange(tile.first, tile.first + tile.rows, dtype=np.int32)
        rows, columns = np.divmod(numbers, np.int32(tile.width // self._row_edge))
        positions: Int32Array = np.stack([np.zeros_like(rows), rows, columns], axis=1) + np.int32(time)
        check_range("positions of images", positions, 0, self._num_positions)
        return positions


class GraphRotaryPositions(RotaryPositions):
    """Gives the graph the positions. The graph then gathers cosines and sines (``StepInputs.rotary_positions``)."""

    def refresh(self, inputs: StepInputs) -> None:
        del inputs  # the step reader has already selected the rotary positions of these sequences

    def _take_text(self, inputs: StepInputs, positions: Int32Array) -> None:
        inputs.rotary_positions[:] = positions[:, None]

    def _take_tile(self, inputs: StepInputs, token: int, positions: Int32Array) -> None:
        inputs.rotary_positions[token : token + len(positions)] = positions


class RotaryRows(RotaryPositions):
    """Gathers the cosines and sines of a step's tokens from the tables of all positions, for a graph that reads them.

    Also subtracts each token's shift from ``positions`` of the step's inputs. For a text token, this gives its
    rotary position.
    """

    def __init__(self, config: Config, out: tuple[Array, Array]) -> None:
        """``out`` has two arrays [tokens of the largest step, rotary width], which the graph reads."""
        super().__init__(config)
        self._tables = rotary_tables(config.shape, self._num_positions)
        self._out = out
        sections = np.repeat(np.arange(NUM_ROTARY_DIMENSIONS), config.shape.rotary_sections)
        self._dimensions = np.concatenate([sections, sections])
        """For each element of a head: the dimension of the rotary position (0: time, 1: row, 2: column) by which it is
        rotated."""

    def refresh(self, inputs: StepInputs) -> None:
        for table, out in zip(self._tables, self._out, strict=True):
            # The positions have been checked. With a mode other than "clip", NumPy would first write to a copy of
            # ``out``.
            np.take(table, inputs.positions, axis=0, out=out[: inputs.positions.size], mode="clip")

    def _take_text(self, inputs: StepInputs, positions: Int32Array) -> None:
        inputs.positions[:] = positions
        self.refresh(inputs)

    def _take_tile(self, inputs: StepInputs, token: int, positions: Int32Array) -> None:
        numbers = positions[:, self._dimensions]
        for table, out in zip(self._tables, self._out, strict=True):
            out[token : token + len(positions)] = np.take_along_axis(table, numbers, axis=0)


def rotary_positions_of(config: Config, ops: OpTable) -> RotaryPositions | None:
    """Makes the object that gives rotary positions to the graph of ``ops``. None if positions have one dimension."""
    if ops.reads_rotary_positions:
        return GraphRotaryPositions(config)
    return None if ops.rotary_rows is None else RotaryRows(config, ops.rotary_rows)
