"""Makes the first input of the graph of a model that reads images.

The input has the embeddings of text tokens, and outputs of the vision encoder for image tokens.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from agent.model_loading import LoadedModel
from agent.models.separate import load_separately, whole_embedding
from agent.step_inputs import StepInputs, check_range
from agent.vision.arithmetic import rounded
from agent.vision.encoder import Encoder
from agent.vision.names import vision_specs
from agent.vision.qwen_encoder import QwenEncoder
from agent.vision.rotary_rows import RotaryPositions, rotary_positions_of
from agent.weights.storage import Array, allocate
from llm_serving.config import Config
from llm_serving.errors import AgentStartError, ProtocolError
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.ipc.tiles import StepTile, digest_of, read_tiles


class ImageRows:
    """Embeds the tokens of each step, and replaces the embeddings of image tokens by the outputs of the vision encoder.

    The encoder computes a matrix for each tile, with one row for each image token of the tile. The matrices of the most
    recently used tiles are cached, by the digest and the size of their pixels. So a tile is encoded only once even if
    several chunks of a prompt have parts of it.
    """

    def __init__(
        self,
        config: Config,
        encoder: Encoder | QwenEncoder,
        table: Array,
        out: Array,
        tiles: TileMemory,
        rotary: RotaryPositions | None = None,
    ) -> None:
        """``table`` [vocabulary, hidden size] has the embeddings of the tokens.

        The first input of the graph is written to ``out`` [tokens of the largest step, hidden size]. ``rotary`` writes
        the rotary positions of each step, or is None if positions have only one dimension.
        """
        vision, processing = config.shape.vision, config.processing
        assert vision is not None, "only a model with a vision encoder has rows of images"
        assert processing is not None, "only a model with a vision encoder has rows of images"
        self._vision = vision
        self._smallest = processing.fewest_rows(vision)
        self._rotary = rotary
        self._dtype = config.model_config.model_dtype
        self._max_cached = config.cached_rows
        self._num_cached = 0
        """Number of rows in ``_cached``."""
        self._encoder = encoder
        self._table = table
        self._out = out
        self._tiles = tiles
        self._cached: OrderedDict[tuple[bytes, int, int], Array] = OrderedDict()
        self.num_encoded = 0
        """Number of tiles that the encoder has computed."""

    @classmethod
    def load(cls, config: Config, model: LoadedModel, tiles: TileMemory | None) -> ImageRows:
        """Reads the weights of the encoder. Raises CheckpointError if a tensor is missing or has another shape.

        ``tiles`` is the shared memory with the pixels.
        """
        vision, processing = config.shape.vision, config.processing
        if vision is None or processing is None or tiles is None:
            raise AgentStartError("a model that reads images needs the shared memory of tiles")
        hidden, dtype = config.shape.hidden_size, config.model_config.model_dtype
        weights = load_separately(config, vision_specs(vision, hidden))
        table = model.weights["embedding.weight"]
        if model.ops.is_split:
            # This table has only the agent's part of the vocabulary. In a text model, the graph adds the embeddings of
            # all agents. A model with images embeds the tokens before the graph, where the agents' embeddings are not
            # added. So each agent needs the whole table.
            table = whole_embedding(config)
        encoder_class = Encoder if vision.windows is None else QwenEncoder
        encoder = encoder_class(vision, processing, hidden, dtype, weights)
        rotary = rotary_positions_of(config, model.ops)
        out = model.ops.rows
        if out is None:
            out = allocate((config.max_num_batched_tokens, hidden), dtype)
        return cls(config, encoder, table, out, tiles, rotary)

    def warm_up(self) -> None:
        """Encodes a tile of the smallest size, so that all code has run once.

        If tiles may have an arbitrary size, encoding the largest possible tile would take too long. The memory plan
        accounts for the memory of the largest tile.
        """
        height = self._vision.image_size or self._vision.row_edge
        width = self._vision.image_size or self._vision.row_edge * self._smallest
        self._encoder.rows(np.zeros((height, width, 3), np.uint8))

    def entry(self, slot: StepSlot, inputs: StepInputs) -> Array:
        """Returns the first input of the graph for a step, [tokens, hidden size].

        Encodes the tiles that are not cached. Raises ProtocolError if a tile of ``slot`` is not valid.
        """
        tiles = read_tiles(slot.tiles, slot.num_tiles)
        for tile in tiles:
            self._check(tile, inputs)
        if self._rotary is not None:
            self._rotary.fill(slot, inputs)
        out = self._embedded(inputs)
        for tile in tiles:
            out[tile.token : tile.token + tile.rows] = self._rows(tile)[tile.first : tile.first + tile.rows]
        return out

    def embedded(self, inputs: StepInputs) -> Array:
        """Returns the embeddings [tokens, hidden size] of a decode step that the row check computes again.

        ``inputs`` has some sequences of the last step. All tokens are text tokens.
        """
        if self._rotary is not None:
            self._rotary.refresh(inputs)
        return self._embedded(inputs)

    def _embedded(self, inputs: StepInputs) -> Array:
        out = self._out[: inputs.token_ids.size]
        # The reader has checked the ids. With a mode other than "clip", NumPy would check them again and first write to
        # a copy of ``out``.
        np.take(self._table, inputs.token_ids, axis=0, out=out, mode="clip")
        return out

    def _check(self, tile: StepTile, inputs: StepInputs) -> None:
        """Raises ProtocolError if a size or an index of a tile is out of range, or if the tile replaces tokens other
        than image tokens."""
        values = np.array([tile.place, tile.token, tile.first, tile.rows], np.int32)
        most = self._tiles.layout.tile_pixels
        if not self._vision.is_tile(tile.height, tile.width) or tile.height * tile.width > most:
            raise ProtocolError(
                f"a step has a tile of {tile.width} x {tile.height} pixels; the largest has {most} pixels, and the "
                f"edges are multiples of {self._vision.image_size or self._vision.row_edge}"
            )
        tokens, rows = inputs.token_ids.size, self._vision.rows_of(tile.height * tile.width)
        for name, value, low, high in (
            ("tile places", values[:1], 0, self._tiles.layout.num_places),
            ("tokens of tiles", values[1:2], 0, tokens),
            ("first rows of tiles", values[2:3], 0, rows),
            ("numbers of rows", values[3:], 1, min(rows - tile.first, tokens - tile.token) + 1),
        ):
            check_range(name, value, low, high)
        if (inputs.token_ids[tile.token : tile.token + tile.rows] != self._vision.image_token_id).any():
            raise ProtocolError(f"the tile at token {tile.token} of a step replaces a token that is not an image token")

    def _rows(self, tile: StepTile) -> Array:
        key = (tile.digest, tile.height, tile.width)
        cached = self._cached.get(key)
        if cached is not None:
            self._cached.move_to_end(key)
            return cached
        count = tile.height * tile.width
        pixels = self._tiles.pixels[tile.place, :count].reshape(tile.height, tile.width, 3).copy()
        if digest_of(pixels) != tile.digest:
            raise ProtocolError(f"place {tile.place} of the tiles has other pixels than the step expects")
        rows = rounded(self._encoder.rows(pixels), self._dtype)
        self.num_encoded += 1
        self._cached[key] = rows
        self._num_cached += len(rows)
        while self._num_cached > self._max_cached and len(self._cached) > 1:
            self._num_cached -= len(self._cached.popitem(last=False)[1])
        return rows
