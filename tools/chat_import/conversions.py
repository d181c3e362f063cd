"""Converts values of a ``configuration.json`` to values of this project's keys, for example ``fp16`` to ``float16``.

The range of a converted value is checked later, with the limits of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

MAX_PORT = 65535
"""Largest port number."""
MAX_MICROSECONDS = 60_000_000
"""Maximum of a time in microseconds. The key accepts up to 60 s."""
_WEIGHT_FILES = (".ckpt", ".mindir", ".ms", ".pt", ".pth", ".bin", ".safetensors")
"""Endings of files that are not a whole model."""


class WrongValueError(Exception):
    """Raised if a value cannot be converted. The message states what the value must be."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A function that converts a value, and the values that it accepts in words."""

    convert: Callable[[object], object]
    allowed: str = ""
    """Accepted values. Empty if the limits of the key describe them."""


def _port(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PORT:
        raise WrongValueError(f"must be an integer from 1 to {MAX_PORT}")
    return value


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _model_path(value: object) -> object:
    if isinstance(value, str) and PurePath(value).suffix in _WEIGHT_FILES:
        raise WrongValueError("is a file of weights; must be a Hugging Face folder or a GGUF file")
    return value


def _seconds(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValueError("must be a number of microseconds")
    if not 0 <= value <= MAX_MICROSECONDS:  # a division of a larger integer may overflow
        raise WrongValueError(f"must be 0 to {MAX_MICROSECONDS} microseconds")
    return value / 1_000_000


def _first_device(value: object) -> object:
    return _devices(value)[0]


def _num_devices(value: object) -> object:
    return len(_devices(value))


def _devices(value: object) -> list[int]:
    """Returns the numbers of the devices. Some servers have one list of devices for each copy of the model."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    problem = "must be a list of consecutive device numbers, as in [0, 1], for one copy of the model"
    if not isinstance(value, list) or not value or not all(_is_integer(each) for each in value):
        raise WrongValueError(problem)
    if value != list(range(value[0], value[0] + len(value))):
        raise WrongValueError(problem)
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _choice(names: Mapping[str, tuple[str, ...]]) -> Conversion:
    """Returns a conversion of texts. ``names`` maps each value of the key to its other spellings, in lower case."""
    spellings = {each: value for value, others in names.items() for each in (value.lower(), *others)}
    allowed = ", ".join(f"`{each}`" for each in spellings)

    def convert(value: object) -> object:
        if not isinstance(value, str) or value.lower() not in spellings:
            raise WrongValueError(f"must be one of {', '.join(spellings)}")
        return spellings[value.lower()]

    return Conversion(convert, allowed)


def true_means(value: str) -> Conversion:
    """Returns a conversion of true to ``value``. False is refused, because it names no other value."""

    def convert(given: object) -> object:
        if given is not True:
            raise WrongValueError("must be true; another value does not name a batching mode")
        return value

    return Conversion(convert, f"`true`: `{value}`")


UNCHANGED = Conversion(lambda value: value)
PORT = Conversion(_port, f"integer, 1 to {MAX_PORT}")
LIST = Conversion(_as_list)
"""Makes a list of a single value, because the key is a list."""
MODEL_PATH = Conversion(_model_path, "Hugging Face folder or GGUF file")
MICROSECONDS = Conversion(_seconds, "microseconds, up to 60 s")
FIRST_DEVICE = Conversion(_first_device, "list of consecutive device numbers")
NUM_DEVICES = Conversion(_num_devices, "list of consecutive device numbers")
DTYPE = _choice(
    {
        "auto": (),
        "float16": ("fp16", "half", "datatype.float16", "mindspore.float16", "ms.float16", "mstype.float16"),
        "bfloat16": ("bf16", "datatype.bfloat16", "mindspore.bfloat16", "ms.bfloat16", "mstype.bfloat16"),
        "float32": ("fp32", "float", "datatype.float32", "mindspore.float32", "ms.float32", "mstype.float32"),
    }
)
WEIGHT_FORMAT = _choice(
    {"int8": ("w8a8",), "int8_weight_only": ("w8a16",), "int4": ("w4a8",), "int4_weight_only": ("w4a16",), "auto": ()}
)
DEVICE = _choice({"Ascend": ("npu",), "CPU": (), "auto": ()})
TASK = _choice(
    {
        "generate": ("text-generation", "text2text-generation", "text_generation", "chat"),
        "embed": ("sentence-embedding", "feature-extraction"),
        "score": ("text-ranking",),
        "classify": ("text-classification",),
        "auto": (),
    }
)
LEVEL = _choice({"debug": ("trace", "verbose"), "info": (), "warning": ("warn",), "error": ()})
