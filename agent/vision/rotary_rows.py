"""Rotary embedding of positions with three dimensions: time, height and width (M-RoPE, arXiv:2409.12191, section 2.1).

A text token has the same number in all three dimensions. An image token has the time of its image, and the row and
column of its place in the image. The token after an image continues with the largest number of the image plus one. This
number is smaller than the token's position in the sequence. The difference is the token's shift, which the server sends
with each step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agent.layers.rotary import rotary_tables
from agent.step_inputs import StepInputs, check_range
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tiles import read_tiles


class RotaryRows:
    """Gathers the cosines and sines of the tokens of each step from the tables of all positions."""

    def __init__(self, config: Config, out: tuple[Array, Array]) -> None:
        """``out`` has two arrays [tokens of the largest step, rotary width], which the graph reads."""
        self._num_positions = config.max_model_len
        self._tables = rotary_tables(config.shape, self._num_positions)
        self._out = out
        assert config.shape.vision is not None, "only images have positions with three dimensions"
        self._row_edge = config.shape.vision.row_edge
        sections = np.repeat(np.arange(3), config.shape.rotary_sections)
        self._dimensions = np.concatenate([sections, sections])
        """The dimension of positions to which each element of a head belongs."""

    def fill(self, slot: StepSlot, inputs: StepInputs) -> None:
        """Fills the rows of cosines and sines of a step, and replaces its positions by rotary positions.

        The tiles of ``slot`` must have been checked before, by ``ImageRows`` or by the first stage of a pipeline.
        Raises ProtocolError if a position is not valid.
        """
        self.shift(slot, inputs)
        self.gather(inputs)
        for tile in read_tiles(slot.tiles, slot.num_tiles):
            numbers = np.arange(tile.first, tile.first + tile.rows, dtype=np.int32)
            cells = np.stack(np.divmod(numbers, np.int32(tile.width // self._row_edge)), axis=1)
            self.place(tile.token, int(inputs.positions[tile.token]) - tile.first, cells)

    def shift(self, slot: StepSlot, inputs: StepInputs) -> None:
        """Replaces the positions of a step by rotary positions. Raises ProtocolError if a rotary position would be
        negative.

        The tokens of an image get the positions that text tokens would have. ``place`` later overwrites their rows.
        """
        shifts = slot.position_shifts[: inputs.positions.size]
        check_range("position_shifts", shifts, 0, self._num_positions)
        if (shifts > inputs.positions).any():
            raise ProtocolError("a step's position_shifts holds a number above the position of its token")
        np.subtract(inputs.positions, shifts, out=inputs.positions)

    def gather(self, inputs: StepInputs) -> None:
        """Fills the rows of cosines and sines for all tokens of a step. ``shift`` must have replaced the positions."""
        for table, out in zip(self._tables, self._out, strict=True):
            # The positions have been checked. With a mode other than "clip", NumPy would first write to a copy of
            # ``out``.
            np.take(table, inputs.positions, axis=0, out=out[: inputs.positions.size], mode="clip")

    def place(self, token: int, time: int, cells: npt.NDArray[np.int32]) -> None:
        """Fills the rows of cosines and sines for the tokens of an image, from index ``token`` on.

        ``time`` is the rotary position of the image. ``cells`` [tokens, 2] has the row and the column of each token in
        the image. Raises ProtocolError if a position exceeds the tables.
        """
        positions = np.concatenate([np.full((len(cells), 1), time, np.int32), time + cells], axis=1)
        check_range("positions of images", positions, 0, self._num_positions)
        numbers = positions[:, self._dimensions]
        for table, out in zip(self._tables, self._out, strict=True):
            out[token : token + len(cells)] = np.take_along_axis(table, numbers, axis=0)
