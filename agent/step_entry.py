"""The first input of a step's graph: token ids, embeddings of text and images, or hidden states of the previous stage.
"""

from __future__ import annotations

import numpy as np

from agent.group.exchange import Exchange
from agent.group.last_tokens import SharedLastTokens
from agent.group.model_part import ModelPart
from agent.model_loading import LoadedModel
from agent.step_inputs import StepInputs
from agent.vision.rotary_rows import RotaryPositions, rotary_positions_of
from agent.vision.rows import ImageRows
from agent.weights.storage import STORAGE_DTYPES, Array
from llm_serving.config import Config
from llm_serving.errors import ProtocolError
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tile_memory import TileMemory


class StepEntry:
    """Makes the first input of the graph of an agent's part of the model.

    In the first stage of a pipeline, this input is the token ids [tokens], or the embeddings [tokens, hidden size] if
    the model reads images. Outputs of the vision encoder then replace the embeddings of image tokens. In later stages,
    this input is the residual stream [tokens, hidden size] of the previous stage.
    """

    def __init__(
        self, config: Config, part: ModelPart, exchange: Exchange | None, last_tokens: SharedLastTokens | None
    ) -> None:
        """``config`` has the sizes of the agent's part of the model. ``exchange`` and ``last_tokens`` are None if the
        agent is alone.
        """
        self._config = config
        self._is_first_stage = part.shard.is_first_stage
        self._exchange = exchange
        self._last_tokens = last_tokens
        self._stream: Array = np.empty((0, 0))
        """Receives the hidden states of the previous stage: [tokens of the largest step, hidden size]."""
        if not self._is_first_stage:
            shape = (config.max_num_batched_tokens, config.shape.hidden_size)
            self._stream = np.zeros(shape, STORAGE_DTYPES[config.model_config.model_dtype])
        self._images: ImageRows | None = None
        self._rotary: RotaryPositions | None = None
        """Computes rotary positions in later stages of a pipeline. None in the first stage."""

    def load(self, model: LoadedModel, tiles: TileMemory | None) -> bool:
        """Prepares this object for images if ``model`` reads images. Returns False if the model reads only text.

        ``tiles`` is the shared memory with the pixels. Raises CheckpointError or AgentStartError.
        """
        if model.ops.takes_rows:
            self._images = ImageRows.load(self._config, model, tiles)
        else:
            self._rotary = rotary_positions_of(self._config, model.ops)
        return self._images is not None or self._rotary is not None

    def warm_up(self) -> None:
        """Encodes a small image if the model reads images."""
        if self._images is not None:
            self._images.warm_up()

    def of_step(self, inputs: StepInputs, slot: StepSlot | None) -> Array:
        """Returns the first input of the graph for a step. In a later stage, waits for the previous stage.

        ``slot`` has the tiles of images. It is None if the row check computes a decode step again, which has no tiles.
        Raises ProtocolError if a tile is not valid. In a group, raises RuntimeError instead, which ends the group: the
        other agents already wait for this agent's activations, so it cannot refuse the step.
        """
        if self._exchange is None:
            return self._embedded(inputs, slot)
        assert self._last_tokens is not None
        if self._is_first_stage:
            self._last_tokens.resolve(inputs.token_ids, inputs.rows, inputs.query_lens)
        try:
            if self._is_first_stage:
                return self._embedded(inputs, slot)
            self._fill_rotary(inputs, slot)
        except ProtocolError as problem:
            raise RuntimeError(str(problem)) from problem
        stream = self._stream[: inputs.token_ids.size]
        self._exchange.receive(stream)
        return stream

    def _embedded(self, inputs: StepInputs, slot: StepSlot | None) -> Array:
        if self._images is None:
            return inputs.token_ids
        return self._images.embedded(inputs) if slot is None else self._images.entry(slot, inputs)

    def _fill_rotary(self, inputs: StepInputs, slot: StepSlot | None) -> None:
        """Gives the graph of a later stage the rotary positions, if the model reads images."""
        if self._rotary is not None and slot is None:
            self._rotary.refresh(inputs)
        elif self._rotary is not None and slot is not None:
            self._rotary.fill(slot, inputs)
