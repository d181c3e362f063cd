"""Makes the first input of the graph of a model that reads images: embeddings of tokens, and rows of tiles."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np

from agent.model_loading import LoadedModel
from agent.step_inputs import StepInputs, check_range
from agent.vision.encoder import Encoder, rounded
from agent.vision.names import vision_specs
from agent.weights import Packing, load_weights, open_weights
from agent.weights.storage import Array
from llm_serving.config import Config
from llm_serving.errors import AgentStartError, ProtocolError
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.ipc.tiles import StepTile, digest_of, read_tiles


class ImageRows:
    """Embeds the tokens of each step and replaces the embeddings of image tokens by the rows of their tiles.

    Keeps the rows of the tiles that were used last, by the digest of their pixels. So a prompt whose chunks have parts
    of a tile encodes it once.
    """

    def __init__(
        self,
        config: Config,
        encoder: Encoder,
        table: Array,
        out: Array,
        tiles: TileMemory,
    ) -> None:
        """``table`` [vocabulary, hidden size] has the embeddings of the tokens.

        ``out`` [tokens of the largest step, hidden size] is the memory of the graph's first input.
        """
        vision = config.shape.vision
        assert vision is not None, "only a model with a vision encoder has rows of images"
        self._vision = vision
        self._dtype = config.model_config.model_dtype
        self._max_cached = config.image_config.cached_tiles
        self._encoder = encoder
        self._table = table
        self._out = out
        self._tiles = tiles
        self._cached: OrderedDict[bytes, Array] = OrderedDict()
        self.num_encoded = 0
        """Number of tiles that the encoder has computed."""

    @classmethod
    def load(cls, config: Config, model: LoadedModel, tiles: TileMemory | None) -> ImageRows:
        """Reads the weights of the encoder. Raises CheckpointError if a tensor is missing or has another shape.

        ``tiles`` is the shared memory with the pixels.
        """
        from agent.backends.cpu.ops import FusedCpuOps

        vision, processing = config.shape.vision, config.processing
        if vision is None or processing is None or tiles is None or not isinstance(model.ops, FusedCpuOps):
            raise AgentStartError("a model that reads images needs fused operators and the shared memory of tiles")
        hidden, dtype, settings = config.shape.hidden_size, config.model_config.model_dtype, config.model_config
        specs = vision_specs(vision, hidden)
        seed = settings.seed if settings.load_format == "dummy" else None
        folder = None if settings.model_path is None else Path(settings.model_path)
        # Ignores all other tensors. The text model has checked that they belong to the text model.
        source = open_weights(folder, specs, seed=seed, ignorable=("",))
        try:
            weights = load_weights(specs, source, dtype, lambda done, total: None, Packing(dtype))
        finally:
            source.close()
        encoder = Encoder(vision, processing, hidden, dtype, weights)
        return cls(config, encoder, model.weights["embedding.weight"], model.ops.rows, tiles)

    def warm_up(self) -> None:
        """Encodes a tile, which proves that the memory suffices."""
        self._encoder.rows(np.zeros((self._vision.image_size, self._vision.image_size, 3), np.uint8))

    def entry(self, slot: StepSlot, inputs: StepInputs) -> Array:
        """Returns the first input of the graph for a step, [tokens, hidden size].

        Encodes the tiles that are not cached. Raises ProtocolError if a tile of ``slot`` is not valid.
        """
        out = self.embedded(inputs)
        for tile in read_tiles(slot.tiles, slot.num_tiles):
            self._check(tile, inputs)
            out[tile.token : tile.token + tile.rows] = self._rows(tile)[tile.first : tile.first + tile.rows]
        return out

    def embedded(self, inputs: StepInputs) -> Array:
        """Returns the embeddings of the tokens of a step without images, [tokens, hidden size]."""
        out = self._out[: inputs.token_ids.size]
        # The reader has checked the ids. NumPy would check them again, and copy the result, with another mode.
        np.take(self._table, inputs.token_ids, axis=0, out=out, mode="clip")
        return out

    def _check(self, tile: StepTile, inputs: StepInputs) -> None:
        """Raises ProtocolError if the numbers of a tile exceed a limit, or if its tokens are not image tokens."""
        values = np.array([tile.place, tile.token, tile.first, tile.rows], np.int32)
        tokens, rows = inputs.token_ids.size, self._vision.tile_rows
        for name, value, low, high in (
            ("tile places", values[:1], 0, self._tiles.layout.num_places),
            ("tokens of tiles", values[1:2], 0, tokens),
            ("first rows of tiles", values[2:3], 0, rows),
            ("numbers of rows", values[3:], 1, min(rows - tile.first, tokens - tile.token) + 1),
        ):
            check_range(name, value, low, high)
        if (inputs.token_ids[tile.token : tile.token + tile.rows] != self._vision.image_token_id).any():
            raise ProtocolError(f"the tile at token {tile.token} of a step replaces a token that is no image token")

    def _rows(self, tile: StepTile) -> Array:
        cached = self._cached.get(tile.digest)
        if cached is not None:
            self._cached.move_to_end(tile.digest)
            return cached
        pixels = self._tiles.pixels[tile.place].copy()
        if digest_of(pixels) != tile.digest:
            raise ProtocolError(f"place {tile.place} of the tiles has other pixels than the step expects")
        rows = rounded(self._encoder.rows(pixels), self._dtype)
        self.num_encoded += 1
        self._cached[tile.digest] = rows
        if len(self._cached) > self._max_cached:
            self._cached.popitem(last=False)
        return rows
