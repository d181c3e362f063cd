"""The vision encoder of a model that reads images, and how its images are prepared, from the files of a model folder.

The family is Idefics3 (Laurencon et al., arXiv:2408.12637) and SmolVLM (Marafioti et al., arXiv:2504.05299): a SigLIP
encoder (Zhai et al., arXiv:2303.15343), a connector that joins neighbouring patches, and a Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields

_MAX_SIZE = 65_536
_MAX_LAYERS = 256
_MAX_HEADS = 256
MAX_IMAGE_SIZE = 2048
"""Maximum width and height of a tile, in pixels."""
MAX_EDGE = 4096
"""The longest edge of an image after it is resized, at most. transformers has the same limit."""
_MAX_JSON_BYTES = 1024 * 1024
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""The numbers with which ``preprocessor_config.json`` names the filters of Pillow."""
_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision encoder and of its connector.

    The encoder computes one tile at a time: a square of ``image_size`` pixels, divided into square patches.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    scale_factor: int
    """The connector joins squares of ``scale_factor`` x ``scale_factor`` patches into one row."""
    image_token_id: int
    """The token id that stands for each row of a tile in a prompt."""

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.patches_per_side**2

    @property
    def tile_rows(self) -> int:
        """Number of rows, and so of prompt tokens, that a tile has after the connector."""
        return (self.patches_per_side // self.scale_factor) ** 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's pixels: red, green and blue as integers from 0 to 255."""
        return self.image_size**2 * 3

    @property
    def connector_inputs(self) -> int:
        return self.hidden_size * self.scale_factor**2

    @property
    def patch_inputs(self) -> int:
        """Number of values of a patch."""
        return 3 * self.patch_size**2

    @property
    def num_layer_parameters(self) -> int:
        """Number of weights of the linear layers of all encoder layers, without biases."""
        return self.num_layers * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)

    def num_parameters(self, text_hidden: int) -> int:
        """Return the number of weights of encoder and connector. ``text_hidden`` is the hidden size of the text
        model.
        """
        hidden = self.hidden_size
        layer = 4 * hidden + (self.intermediate_size + hidden) + 4 * hidden  # biases and norms
        around = hidden * (self.patch_inputs + 1) + self.num_patches * hidden + 2 * hidden
        return self.num_layer_parameters + self.num_layers * layer + around + self.connector_inputs * text_hidden

    def operations(self, text_hidden: int) -> int:
        """Return the multiplications that encoding one tile takes."""
        attention = 2 * self.num_layers * self.num_patches**2 * self.hidden_size
        patches = self.num_patches * (self.num_layer_parameters + self.patch_inputs * self.hidden_size)
        return attention + patches + self.tile_rows * self.connector_inputs * text_hidden


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

    def max_tiles(self, image_size: int) -> int:
        """Return the maximum number of tiles of an image."""
        per_side = -(-self.longest_edge // image_size)
        return per_side**2 + 1 if self.splits and per_side > 1 else 1


def text_fields(fields: TypedFields) -> TypedFields:
    """Return the keys of the text model in the ``config.json`` of a model that reads images."""
    text = fields.mapping("text_config")
    if not text:
        raise fields.fail("text_config", "is missing; it has the sizes of the text model")
    if text.text("model_type", "llama") != "llama":
        raise text.fail("model_type", "is not supported; only llama")
    key = "tie_word_embeddings"
    return text.with_value(key, fields.boolean(key, False)) if key in fields else text


def read_vision(fields: TypedFields, vocab_size: int) -> VisionShape:
    """Return the sizes of the vision encoder. ``fields`` are those of the whole ``config.json``.

    Raises the error class of ``fields`` for values that are wrong or not supported. The defaults of absent keys are
    those of transformers.
    """
    vision = fields.mapping("vision_config")
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


def read_processing(folder: Path, shape: VisionShape) -> ImageProcessing:
    """Return how a model folder prepares images: ``preprocessor_config.json``, or the part ``image_processor`` of
    ``processor_config.json``, which newer folders have instead.

    Raises CheckpointError with file, key and value.
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
    tile = fields.mapping("max_image_size").integer("longest_edge", 364, 1, MAX_IMAGE_SIZE)
    if tile != shape.image_size:
        raise fields.fail("max_image_size", f"must have the image_size of config.json, which is {shape.image_size}")
    number = fields.integer("resample", 1, 0, 5)
    if number not in _FILTERS:
        raise fields.fail("resample", f"is not supported; only {', '.join(f'{n} ({f})' for n, f in _FILTERS.items())}")
    return ImageProcessing(
        longest_edge=fields.mapping("size").integer("longest_edge", 4 * 364, 1, MAX_EDGE),
        splits=fields.boolean("do_image_splitting", True),
        resample=_FILTERS[number],
        rescale_factor=fields.number("rescale_factor", 1 / 255, 0.0, 1.0),
        mean=_three(fields, "image_mean", lowest=-1e6),
        std=_three(fields, "image_std", lowest=0.0),
    )


def _three(fields: TypedFields, key: str, lowest: float) -> tuple[float, ...]:
    """Return a list of three numbers above ``lowest``. The default of each is 0.5."""
    values = fields.value(key)
    if values is None:
        return (0.5, 0.5, 0.5)
    if (
        not isinstance(values, list)
        or len(values) != 3
        or not all(type(value) in (int, float) and lowest < value < 1e6 for value in values)
    ):
        raise fields.fail(key, f"must be three numbers above {lowest:g}")
    return tuple(float(value) for value in values)
