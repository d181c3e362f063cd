"""Scaling of rotary angles beyond the trained context, read from ``config.json`` and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm_serving.formats.typed_fields import TypedFields

MAX_POSITIONS = 16 * 1024 * 1024
_MAX_FACTOR = 1e6
_TYPES = ("default", "none", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One of four scaling rules; ``agent.layers.rotary`` has their arithmetic.

    ``linear`` divides every frequency by ``factor`` (Chen et al. 2023). ``dynamic`` raises the base as a position
    passes the trained context (NTK-aware scaling, bloc97 and emozilla 2023). ``llama3`` divides low frequencies, keeps
    high ones and blends in between. ``yarn`` blends between two numbers of rotations, and scales queries and keys (Peng
    et al. 2023). Fields that a rule does not use keep their defaults.
    """

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Tokens of the trained context."""
    beta_fast: float = 32.0
    """``yarn``: frequencies with at least this number of rotations in the trained context stay."""
    beta_slow: float = 1.0
    """``yarn``: frequencies with at most this number of rotations are divided by ``factor``."""
    truncate: bool = True
    """``yarn``: the bounds between them are rounded outwards to whole dimensions."""
    attention_factor: float = 1.0
    """``yarn``: factor of cosines and sines."""

    def max_positions(self, max_position_embeddings: int) -> int:
        """Return the longest context. ``max_position_embeddings`` of ``config.json`` may state the trained one."""
        if self.type in ("dynamic", "yarn"):
            stretched = int(self.original_max_position_embeddings * self.factor)
            return min(max(max_position_embeddings, stretched), MAX_POSITIONS)
        return max_position_embeddings


def read_rope_scaling(rope: TypedFields, max_position_embeddings: int) -> RopeScaling | None:
    """Read ``rope_scaling`` (with ``type`` or ``rope_type``) or the newer ``rope_parameters``. None: no scaling.

    Raises the fields' error with file, key and value.
    """
    rope.refuse_nested()
    kind = rope.text("rope_type" if "rope_type" in rope else "type", "default", _TYPES)
    if rope.number("partial_rotary_factor", 1.0, 0.0, 1.0) != 1.0:
        raise rope.fail("partial_rotary_factor", "is not supported; every head dimension is rotated")
    if kind in ("default", "none"):
        return None
    factor = rope.number("factor", None, 0.0, _MAX_FACTOR)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "dynamic":
        if factor < 1.0:
            raise rope.fail("factor", "must be at least 1")
        return RopeScaling("dynamic", factor, original_max_position_embeddings=max_position_embeddings)
    return _llama3(rope, factor) if kind == "llama3" else _yarn(rope, factor, max_position_embeddings)


def _llama3(rope: TypedFields, factor: float) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        factor,
        rope.number("low_freq_factor", None, 0.0, _MAX_FACTOR),
        rope.number("high_freq_factor", None, 0.0, _MAX_FACTOR),
        rope.integer("original_max_position_embeddings", None, 1, MAX_POSITIONS),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fail("high_freq_factor", f"must be above low_freq_factor = {scaling.low_freq_factor:g}")
    return scaling


def _yarn(rope: TypedFields, factor: float, max_position_embeddings: int) -> RopeScaling:
    scaling = RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=rope.integer(
            "original_max_position_embeddings", max_position_embeddings, 1, MAX_POSITIONS
        ),
        beta_fast=rope.number("beta_fast", 32.0, 0.0, _MAX_FACTOR),
        beta_slow=rope.number("beta_slow", 1.0, 0.0, _MAX_FACTOR),
        truncate=rope.boolean("truncate", True),
        attention_factor=_attention_factor(rope, factor),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        raise rope.fail("beta_fast", f"must be above beta_slow = {scaling.beta_slow:g}")
    return scaling


def _attention_factor(rope: TypedFields, factor: float) -> float:
    """As stated, else 0.1 ln(factor) + 1 (YaRN's fit); with both ``mscale`` (DeepSeek's), the ratio of two of them."""
    if "attention_factor" in rope:
        return rope.number("attention_factor", None, 0.0, 1000.0)
    if "mscale" in rope and "mscale_all_dim" in rope:
        scales = [rope.number(key, None, 0.0, 1000.0) for key in ("mscale", "mscale_all_dim")]
        return _fitted(factor, scales[0]) / _fitted(factor, scales[1])
    return _fitted(factor, 1.0)


def _fitted(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
