"""The registry of number formats: one entry for each format of weights and of the KV cache.

Code that depends on a format reads the entry's fields, and never compares the name of the format. An unknown name is
always an error.

To add a weight format, add an entry to ``_WEIGHT_FORMATS`` and follow "Add a weight format" in CONTRIBUTING.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llm_serving.errors import UnknownFormatError

AUTO = "auto"
"""Value of ``weight_format`` and ``kv_format``. It stands for the checkpoint's format or, if there is none, for
``model_config.model_dtype``.
"""
GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale when float weights are rounded to integers."""
GROUP_SIZES_TEXT = f"{', '.join(map(str, GROUP_SIZES[:-1]))} or {GROUP_SIZES[-1]}"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of the weights of linear layers: how memory holds them, and how kernels multiply by them.

    An integer format has weight = (integer - zero point) * scale. Each output of a layer has one scale, or one scale
    for each group of inputs.
    """

    name: str
    """Value of ``model_config.weight_format``."""
    bits: int
    """Number of bits of one weight. Scales and zero points are not counted."""
    storage: str
    """Type of an unpacked weight in memory (a key of ``agent.weights.storage.STORAGE_DTYPES``)."""
    kernel_code: int
    """Number of the format in ``llmk::WeightFormat`` (agent/kernels/ops/linear.h)."""
    summary: str = ""
    """Description of the format for ``docs/configuration.md``."""
    stored_as: str = ""
    """Name of the format that checkpoints use for the same integers. Empty for float formats."""
    zero: int = 0
    """The zero point of all weights if the checkpoint stores no zero points. 0: the integers are signed, and no
    checkpoint may have zero points.
    """
    has_groups: bool = False
    """If True, floats are rounded with a scale for each group of inputs. Otherwise each output has one scale."""
    quantises_activations: bool = False
    """If True, the inputs of a linear layer are rounded to int8, with a scale for each token."""
    native: str | None = None
    """Name of the format in which native operators compute if the config asks for this format. None: native operators
    cannot compute with these weights.
    """
    layouts: tuple[str, ...] = ()
    """Layouts of safetensors checkpoints with integers of the format: ``gptq``, ``awq`` and others."""
    gguf_type: str | None = None
    """GGUF's name of the tensor type that has the integers of the format, for example ``Q8_0``. None if GGUF has no
    type for these integers.
    """
    perplexity_limit: float | None = None
    """Maximum relative increase of the perplexity that ``tools/quality_gate.py`` accepts. None: no limit."""

    @property
    def is_float(self) -> bool:
        """True for float formats, whose weights have no scales."""
        return not self.stored_as

    @property
    def largest(self) -> int:
        """Largest absolute value of a stored integer, for example 127 for int8.

        It is used in formats without a zero point.
        """
        return (1 << (self.bits - 1)) - 1

    @property
    def values_per_byte(self) -> int:
        """Number of integers that native operators store in one byte of a weight."""
        return max(1, 8 // self.bits)

    def on(self, op_table: str) -> WeightFormat:
        """Returns the format in which the operators of ``op_table`` compute if the config asks for this format.

        Raises UnknownFormatError if these operators cannot compute the weights.
        """
        if op_table == "fused":
            return self
        if self.native is None:
            known = ", ".join(name for name, each in WEIGHT_FORMATS.items() if each.native == name)
            raise UnknownFormatError(f"weight format {self.name!r} has no native primitives; use {known} or auto")
        return WEIGHT_FORMATS[self.native]

    def bits_with_scales(self, group: int, device: str) -> float:
        """Returns the mean number of bits of a weight, including the scale and zero point of its group.

        If all inputs of an output share a scale, the scale is ignored.
        """
        if not self.has_groups:
            return float(self.bits)
        # For each group, native operators have a 16-bit scale and a 16-bit offset. CPU kernels have a float32 scale
        # and, for formats with a zero point, one byte.
        of_group = 16 + 16 if device == "Ascend" else 32 + (8 if self.zero else 0)
        return self.bits + of_group / group


_INT8 = WeightFormat(
    "int8",
    bits=8,
    storage="int8",
    kernel_code=3,
    summary="a scale for each output; activations are quantised for each token",
    stored_as="int8",
    quantises_activations=True,
    native="int8",
    layouts=("gptq", "int-quantized", "pack-quantized", "model-slim"),
    gguf_type="Q8_0",
    perplexity_limit=0.01,
)
_INT4 = WeightFormat(
    "int4",
    bits=4,
    storage="uint8",
    kernel_code=5,
    summary="a scale for each group of `weight_group` inputs; activations are quantised with `fused` operators only",
    stored_as="int4",
    zero=8,
    has_groups=True,
    quantises_activations=True,
    native="int4_weight_only",
    layouts=("gptq", "awq", "pack-quantized", "model-slim"),
    gguf_type="Q4_0",
    perplexity_limit=0.05,
)


def _weight_only(of: WeightFormat, kernel_code: int) -> WeightFormat:
    """Returns a format with the same weights as the format ``of``, whose kernels leave activations as floats."""
    name = f"{of.name}_weight_only"
    return replace(
        of,
        name=name,
        kernel_code=kernel_code,
        summary=f"weights as in `{of.name}`; activations stay floats",
        quantises_activations=False,
        native=None if of.native is None else name,
    )


_WEIGHT_FORMATS = (
    WeightFormat("float32", bits=32, storage="float32", kernel_code=0, native="float32"),
    WeightFormat("float16", bits=16, storage="float16", kernel_code=1, native="float16"),
    WeightFormat("bfloat16", bits=16, storage="bfloat16", kernel_code=2, native="bfloat16"),
    _INT8,
    _weight_only(_INT8, kernel_code=4),
    _INT4,
    _weight_only(_INT4, kernel_code=6),
)
WEIGHT_FORMATS = {each.name: each for each in _WEIGHT_FORMATS}
INTEGER_FORMATS = tuple(each for each in _WEIGHT_FORMATS if not each.is_float)
STORED_FORMATS = tuple(each for each in INTEGER_FORMATS if each.stored_as == each.name)
"""The integer formats in which checkpoints can be stored. A weight-only format is not in the list, because its integers
are stored as those of another format: ``int8_weight_only`` as ``int8``."""
_ALIASES = {"bf16": "bfloat16"}


def weight_format(name: str) -> WeightFormat:
    """Returns the weight format with this name. ``bf16`` means ``bfloat16``. Raises UnknownFormatError."""
    found = WEIGHT_FORMATS.get(_ALIASES.get(name, name))
    if found is None:
        raise UnknownFormatError(f"weight format {name!r} is not known; there are {', '.join(WEIGHT_FORMATS)}")
    return found


def formats_of_stored(stored: str) -> tuple[str, ...]:
    """Returns the names of the formats that a checkpoint in the format ``stored`` can be loaded in without changing its
    integers.

    Raises UnknownFormatError.
    """
    return tuple(each.name for each in INTEGER_FORMATS if each.stored_as == weight_format(stored).name)


def stored_format(bits: int) -> WeightFormat:
    """Returns the format of checkpoints whose integers have ``bits`` bits. Raises UnknownFormatError."""
    for each in STORED_FORMATS:
        if each.bits == bits:
            return each
    raise UnknownFormatError(f"no weight format has integers of {bits} bits; there are {', '.join(WEIGHT_FORMATS)}")


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A format of the keys and values in the KV cache."""

    name: str
    element_bytes: int
    scale_bytes: int = 0
    """Bytes of a scale. Each key and each value of a token has one scale in each head."""

    def head_width(self, head_dim: int) -> int:
        """Returns the cache elements of one token's key (or value) in one head, including the scale."""
        return head_dim + self.scale_bytes // self.element_bytes

    def head_bytes(self, head_dim: int) -> int:
        """Returns the cache bytes of one token's key (or value) in one head, including the scale."""
        return self.head_width(head_dim) * self.element_bytes

    def token_bytes(self, kv_heads: int, head_dim: int, op_table: str) -> int:
        """Returns the cache bytes of one token's key and value in one layer, including the scales."""
        if self.scale_bytes == 0 or op_table == "fused":
            return 2 * kv_heads * self.head_bytes(head_dim)
        return 2 * kv_heads * head_dim * self.element_bytes + scale_row_width(kv_heads) * SCALE_ELEMENT_BYTES


SCALE_ELEMENT_BYTES = 2
"""Bytes of an element in the native operators' cache of scales. Its elements are float16 or bfloat16."""
_SCALE_ROW_MULTIPLE = 16
"""A row of the cache of scales has a multiple of this number of elements: 32 bytes, the unit of an Ascend's copies."""


def scale_row_copies(kv_heads: int) -> int:
    """Returns how often a row of the native operators' cache of scales repeats the scales of its token."""
    return _SCALE_ROW_MULTIPLE // math.gcd(4 * kv_heads, _SCALE_ROW_MULTIPLE)


def scale_row_width(kv_heads: int) -> int:
    """Returns the number of elements in a row of the native operators' cache of scales.

    A row has the scales of one token: for each head, one scale of the key and one of the value. A scale is stored as
    two elements of ``model_dtype``, whose sum is the scale. The row repeats all scales until its size is a multiple of
    32 bytes.
    """
    return 4 * kv_heads * scale_row_copies(kv_heads)


_KV_FORMATS = (
    KvFormat("float32", 4),
    KvFormat("float16", 2),
    KvFormat("bfloat16", 2),
    KvFormat("int8", 1, scale_bytes=4),
)
KV_FORMATS = {each.name: each for each in _KV_FORMATS}
INTEGER_KV_FORMATS = tuple(each.name for each in _KV_FORMATS if each.scale_bytes)


def kv_format(name: str) -> KvFormat:
    """Returns the KV cache format with this name. ``bf16`` means ``bfloat16``. Raises UnknownFormatError."""
    found = KV_FORMATS.get(_ALIASES.get(name, name))
    if found is None:
        raise UnknownFormatError(f"KV cache format {name!r} is not known; there are {', '.join(KV_FORMATS)}")
    return found
