"""Reads the files of a model folder that describe its vision encoder and the preparation of images.

There are two families. Idefics3 (Laurencon et al., arXiv:2408.12637) and SmolVLM (Marafioti et al., arXiv:2504.05299)
have a SigLIP encoder (Zhai et al., arXiv:2303.15343). A connector joins neighbouring patches, and the text model is a
Llama. Qwen2.5-VL (Bai et al., arXiv:2502.13923) has another encoder, whose attention has windows, and a Qwen2 as text
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields

_MAX_SIZE = 65_536
"""Maximum hidden or inner size of a vision encoder."""
_MAX_LAYERS = 256
"""Maximum number of layers of a vision encoder."""
_MAX_HEADS = 256
"""Maximum number of attention heads of a vision encoder."""
MAX_IMAGE_SIZE = 2048
"""Maximum width and height of a tile, in pixels."""
MAX_EDGE = 4096
"""Maximum length of the longer edge of a resized image, in pixels. transformers has the same limit."""
_MAX_PIXELS = 1 << 28
"""Maximum number of pixels that a model may accept for an image."""
_MAX_JSON_BYTES = 1024 * 1024
"""Maximum size of the file that describes the preparation of images."""
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""The numbers with which ``preprocessor_config.json`` names the filters of Pillow."""
_ACTIVATION = "gelu_pytorch_tanh"
QUERY_ROWS = 512
"""Number of patches whose attention scores the encoder of Qwen2.5-VL has in memory at a time."""
MAX_PROPORTION = 200
"""Maximum ratio of an image's longer edge to its shorter edge, if tiles may have an arbitrary size, as in transformers.
"""
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and standard deviation of CLIP's pixels (Radford et al., arXiv:2103.00020), which Qwen2.5-VL uses."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The attention windows of Qwen2.5-VL's encoder, which also has two-dimensional rotary embedding, RMSNorm and
    SwiGLU.
    """

    size: int
    """Width and height of a window, counted in squares with edges of ``row_edge`` pixels. The encoder makes one
    embedding of each square. A patch attends only to the patches of its window."""
    full_layers: tuple[int, ...]
    """Indices of the layers in which each patch attends to all patches."""
    frames: int
    """Number of frames of a patch (``temporal_patch_size``). All frames of an image are equal."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision encoder and of its connector.

    The encoder computes one tile at a time, divided into square patches. A tile is a square with edges of
    ``image_size`` pixels. With ``windows``, it is a rectangle whose edges are multiples of ``row_edge`` pixels.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    """Width and height of a tile, in pixels. 0: tiles may have an arbitrary size."""
    patch_size: int
    layer_norm_eps: float
    scale_factor: int
    """The connector joins squares of ``scale_factor`` x ``scale_factor`` patches into one row."""
    image_token_id: int
    """The token id that stands for each row of a tile in a prompt."""
    windows: Windows | None = None
    """The windows of attention in Qwen2.5-VL's encoder. None: the encoder is SigLIP, which has no windows."""

    @property
    def text_prefix(self) -> str:
        """Prefix of the names of the text model's tensors. In checkpoints without an encoder, it is ``model.``."""
        return "model.text_model." if self.windows is None else "model."

    @property
    def text_module(self) -> str:
        """Prefix of the text model's modules in transformers, and of the tensors of PEFT's adapters."""
        return "model.text_model." if self.windows is None else "model.language_model."

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def row_edge(self) -> int:
        """Width and height of the square of pixels that becomes one row, in pixels."""
        return self.patch_size * self.scale_factor

    def rows_of(self, num_pixels: int) -> int:
        """Returns the number of rows, and so of prompt tokens, of a tile with ``num_pixels`` pixels."""
        return num_pixels // self.row_edge**2

    def is_tile(self, height: int, width: int) -> bool:
        """Returns whether a tile may have this height and width."""
        if self.image_size:
            return height == width == self.image_size
        return height > 0 and width > 0 and height % self.row_edge == 0 and width % self.row_edge == 0

    @property
    def connector_inputs(self) -> int:
        return self.hidden_size * self.scale_factor**2

    @property
    def patch_inputs(self) -> int:
        """Number of values of a patch."""
        return 3 * self.patch_size**2 * (1 if self.windows is None else self.windows.frames)

    @property
    def num_layer_parameters(self) -> int:
        """Number of weights of the linear layers of all encoder layers, without biases."""
        matrices = 2 if self.windows is None else 3
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + matrices * self.intermediate_size)

    def num_parameters(self, text_hidden: int) -> int:
        """Returns the number of weights of encoder and connector. ``text_hidden`` is the hidden size of the text
        model.
        """
        hidden, inner, joined = self.hidden_size, self.intermediate_size, self.connector_inputs
        if self.windows is None:
            layer = 4 * hidden + (inner + hidden) + 4 * hidden  # biases and norms
            around = hidden * (self.patch_inputs + 1) + self.patches_per_side**2 * hidden + 2 * hidden
        else:
            layer = 4 * hidden + (2 * inner + hidden) + 2 * hidden
            around = hidden * self.patch_inputs + hidden + joined * (joined + 1) + text_hidden
        return self.num_layer_parameters + self.num_layers * layer + around + joined * text_hidden

    def operations(self, text_hidden: int, num_pixels: int) -> int:
        """Returns the number of multiplications for encoding a tile of ``num_pixels`` pixels."""
        patches, joined = num_pixels // self.patch_size**2, self.connector_inputs
        linear = patches * (self.num_layer_parameters + self.patch_inputs * self.hidden_size)
        full, near, connector = self.num_layers, 0, text_hidden
        if self.windows is not None:
            full = len(self.windows.full_layers)
            near = min(patches, (self.windows.size * self.scale_factor) ** 2) * (self.num_layers - full)
            connector += joined
        attention = 2 * (full * patches + near) * patches * self.hidden_size
        return attention + linear + self.rows_of(num_pixels) * joined * connector

    def activation_floats(self, num_pixels: int) -> int:
        """Returns the maximum number of values that the encoder keeps in memory for a tile of ``num_pixels`` pixels."""
        patches = num_pixels // self.patch_size**2
        # The values are attention scores [patches, patches], queries, keys and values, and hidden values of the MLP.
        # The factor 3 is an upper limit for copies of them. An encoder with windows computes the scores of QUERY_ROWS
        # patches at a time, and its MLP has a gate.
        if self.windows is None:
            return 3 * patches * (patches + 3 * self.hidden_size + self.intermediate_size)
        scores = min(patches, QUERY_ROWS) * patches
        return 3 * (scores + patches * (4 * self.hidden_size + 2 * self.intermediate_size))


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """How an image becomes tiles: the values of ``preprocessor_config.json``."""

    longest_edge: int
    """The longer edge of the resized image, in pixels, before it is cut into tiles."""
    splits: bool
    """Whether a large image is cut into several tiles, in addition to the tile of the whole image."""
    resample: str
    """The filter with which images are resized: lanczos, bilinear or bicubic."""
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """A pixel value x becomes (x * ``rescale_factor`` - mean) / std. ``mean`` and ``std`` have a number for each
    colour."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Minimum and maximum number of pixels of a tile if tiles may have an arbitrary size and the whole image is one
    tile. Otherwise 0.
    """

    def max_tiles(self, image_size: int) -> int:
        """Returns the maximum number of tiles of an image. ``image_size`` is ``VisionShape.image_size``."""
        if not image_size:
            return 1
        per_side = -(-self.longest_edge // image_size)
        return per_side**2 + 1 if self.splits and per_side > 1 else 1

    def tile_pixels(self, vision: VisionShape) -> int:
        """Returns the number of pixels of the largest tile."""
        return vision.image_size**2 or self.max_pixels

    def fewest_rows(self, vision: VisionShape) -> int:
        """Returns the number of embedding rows of the smallest tile, one for each token."""
        return max(1, vision.rows_of(vision.image_size**2 or self.min_pixels))


def text_fields(fields: TypedFields, text_type: str) -> TypedFields:
    """Returns the keys of the text model in the ``config.json`` of a model that reads images.

    ``text_type`` is the ``model_type`` that the text model must have. The keys are in ``text_config``. In folders of
    Qwen2.5-VL, they may be at the top level instead.
    """
    text = fields.mapping("text_config")
    if not text and text_type == QWEN_TEXT:
        return fields
    if not text:
        raise fields.fail("text_config", "is missing; it has the sizes of the text model")
    text.text("model_type", text_type, (text_type,))
    key = "tie_word_embeddings"
    return text.with_value(key, fields.boolean(key, False)) if key in fields else text


QWEN_TEXT = "qwen2_5_vl_text"
"""``model_type`` of the text model of Qwen2.5-VL."""


def read_vision(fields: TypedFields, vocab_size: int, text_hidden: int, text_type: str) -> VisionShape:
    """Returns the sizes of the vision encoder. ``fields`` has the whole ``config.json``.

    ``text_hidden`` is the hidden size of the text model, and ``text_type`` its ``model_type``. Raises the error class
    of ``fields`` for values that are wrong or not supported. The defaults of absent keys are those of transformers.
    """
    vision = fields.mapping("vision_config")
    if text_type == QWEN_TEXT:
        return read_qwen_vision(fields, vision, vocab_size, text_hidden)
    vision.text("hidden_act", _ACTIVATION, (_ACTIVATION,))
    if vision.integer("num_channels", 3, 1, 64) != 3:
        raise vision.fail("num_channels", "is not supported; only 3")
    shape = VisionShape(
        hidden_size=vision.integer("hidden_size", 1152, 1, _MAX_SIZE),
        intermediate_size=vision.integer("intermediate_size", 3072, 1, 8 * _MAX_SIZE),
        num_layers=vision.integer("num_hidden_layers", 12, 1, _MAX_LAYERS),
        num_heads=vision.integer("num_attention_heads", 16, 1, _MAX_HEADS),
        image_size=vision.integer("image_size", 224, 1, MAX_IMAGE_SIZE),
        patch_size=vision.integer("patch_size", 32, 1, MAX_IMAGE_SIZE),
        layer_norm_eps=vision.number("layer_norm_eps", 1e-6, 0.0, 1.0),
        scale_factor=fields.integer("scale_factor", 2, 1, 64),
        image_token_id=fields.integer("image_token_id", 128_257, 0, vocab_size - 1),
    )
    if shape.hidden_size % shape.num_heads:
        raise vision.fail("num_attention_heads", f"does not divide hidden_size = {shape.hidden_size}")
    if shape.image_size % (shape.patch_size * shape.scale_factor):
        problem = f"must be a multiple of patch_size x scale_factor = {shape.patch_size} x {shape.scale_factor}"
        raise vision.fail("image_size", problem)
    return shape


def read_qwen_vision(fields: TypedFields, vision: TypedFields, vocab_size: int, text_hidden: int) -> VisionShape:
    """Returns the sizes of the encoder of Qwen2.5-VL. ``read_vision`` describes the arguments and errors."""
    vision.text("hidden_act", "silu", ("silu",))
    for key in ("in_channels", "in_chans"):
        if vision.integer(key, 3, 1, 64) != 3:
            raise vision.fail(key, "is not supported; only 3")
    layers = vision.integer("depth", 32, 1, _MAX_LAYERS)
    full = vision.value("fullatt_block_indexes")
    if full is None:
        full = [7, 15, 23, 31]
    if not isinstance(full, list) or not all(type(each) is int and 0 <= each < layers for each in full):
        raise vision.fail("fullatt_block_indexes", f"must be a list of layers from 0 to {layers - 1}")
    patch, scale = vision.integer("patch_size", 14, 1, MAX_IMAGE_SIZE), vision.integer("spatial_merge_size", 2, 1, 64)
    window = vision.integer("window_size", 112, 1, MAX_EDGE)
    if window % (patch * scale):
        raise vision.fail("window_size", f"must be a multiple of patch_size x spatial_merge_size = {patch} x {scale}")
    shape = VisionShape(
        hidden_size=vision.integer("hidden_size", 3584, 1, _MAX_SIZE),
        intermediate_size=vision.integer("intermediate_size", 3420, 1, 8 * _MAX_SIZE),
        num_layers=layers,
        num_heads=vision.integer("num_heads", 16, 1, _MAX_HEADS),
        image_size=0,
        patch_size=patch,
        layer_norm_eps=1e-6,
        scale_factor=scale,
        image_token_id=fields.integer("image_token_id", 151_655, 0, vocab_size - 1),
        windows=Windows(
            window // (patch * scale), tuple(sorted(set(full))), vision.integer("temporal_patch_size", 2, 1, 16)
        ),
    )
    if shape.hidden_size % (4 * shape.num_heads):
        raise vision.fail("num_heads", f"x 4 does not divide hidden_size = {shape.hidden_size}")
    if vision.integer("out_hidden_size", 3584, 1, _MAX_SIZE) != text_hidden:
        raise vision.fail("out_hidden_size", f"must be the hidden_size of the text model, which is {text_hidden}")
    return shape


def read_processing(folder: Path, shape: VisionShape, max_tile_pixels: int) -> ImageProcessing:
    """Returns how a model's images are prepared. Reads ``preprocessor_config.json``. Newer folders have the part
    ``image_processor`` of ``processor_config.json`` instead.

    If tiles may have an arbitrary size, ``max_tile_pixels`` limits their number of pixels. Raises CheckpointError with
    file, key and value.
    """
    path = folder / "preprocessor_config.json"
    if path.is_file():
        fields = TypedFields(str(path), read_json_object(path, _MAX_JSON_BYTES, CheckpointError), CheckpointError)
    else:
        path = folder / "processor_config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder}: has no preprocessor_config.json, so it is unknown how the model's images are prepared; "
                "copy the file from the model's repository"
            )
        values = read_json_object(path, _MAX_JSON_BYTES, CheckpointError)
        fields = TypedFields(str(path), values, CheckpointError).mapping("image_processor")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.boolean(key, True):
            raise fields.fail(key, "is not supported; only true")
    any_size = shape.image_size == 0
    number = fields.integer("resample", 3 if any_size else 1, 0, 5)
    if number not in _FILTERS:
        raise fields.fail("resample", f"is not supported; only {', '.join(f'{n} ({f})' for n, f in _FILTERS.items())}")
    least, most = _pixel_limits(fields, shape, max_tile_pixels) if any_size else (0, 0)
    mean, std = _CLIP if any_size else ((0.5,) * 3, (0.5,) * 3)
    return ImageProcessing(
        longest_edge=0 if any_size else _longest_edge(fields, shape),
        splits=not any_size and fields.boolean("do_image_splitting", True),
        resample=_FILTERS[number],
        rescale_factor=fields.number("rescale_factor", 1 / 255, 0.0, 1.0),
        mean=_three(fields, "image_mean", mean, lowest=-1e6),
        std=_three(fields, "image_std", std, lowest=0.0),
        min_pixels=least,
        max_pixels=most,
    )


def _longest_edge(fields: TypedFields, shape: VisionShape) -> int:
    tile = fields.mapping("max_image_size").integer("longest_edge", 364, 1, MAX_IMAGE_SIZE)
    if tile != shape.image_size:
        raise fields.fail("max_image_size", f"must have the image_size of config.json, which is {shape.image_size}")
    return fields.mapping("size").integer("longest_edge", 4 * 364, 1, MAX_EDGE)


def _pixel_limits(fields: TypedFields, shape: VisionShape, max_tile_pixels: int) -> tuple[int, int]:
    """Returns the minimum and the maximum number of pixels of a resized image. ``max_tile_pixels`` limits the
    maximum."""
    assert shape.windows is not None, "only the encoder of Qwen2.5-VL has tiles of any size"
    expected = {"patch_size": shape.patch_size, "merge_size": shape.scale_factor,
                "temporal_patch_size": shape.windows.frames}  # fmt: skip
    for key, value in expected.items():
        if fields.integer(key, value, 1, MAX_IMAGE_SIZE) != value:
            raise fields.fail(key, f"must have the value of config.json, which is {value}")
    size, area = fields.mapping("size"), shape.row_edge**2
    least = size.integer("shortest_edge", 4 * area, 1, _MAX_PIXELS)
    most = size.integer("longest_edge", 1280 * area, 1, _MAX_PIXELS)
    # Older folders have the limits at the top level. If these limits exist, they take precedence.
    least = fields.integer("min_pixels", least, 1, _MAX_PIXELS)
    most = fields.integer("max_pixels", most, 1, _MAX_PIXELS)
    # The maximum must be large enough for the longest shape: one row high and ``MAX_PROPORTION`` rows wide.
    if least > most // 4 or most < area * MAX_PROPORTION:
        problem = f"must be at least {area * MAX_PROPORTION} and 4 times min_pixels"
        raise fields.fail("max_pixels", problem)
    most = max(min(most, max_tile_pixels), area * MAX_PROPORTION)
    return min(least, most // 4), most


def _three(fields: TypedFields, key: str, default: tuple[float, ...], lowest: float) -> tuple[float, ...]:
    """Returns a list of three numbers above ``lowest``."""
    values = fields.value(key)
    if values is None:
        return default
    if (
        not isinstance(values, list)
        or len(values) != 3
        or not all(type(value) in (int, float) and lowest < value < 1e6 for value in values)
    ):
        raise fields.fail(key, f"must be three numbers above {lowest:g}")
    return tuple(float(value) for value in values)
