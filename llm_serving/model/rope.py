"""Reads and checks ``rope_scaling`` of ``config.json``: how rotary angles are scaled for longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm_serving.formats.typed_fields import TypedFields

MAX_POSITIONS = 16 * 1024 * 1024
"""Maximum context of a model, in tokens."""
_MAX_FACTOR = 1e6
"""Largest value of the factors, rotations and divisors that a rotary scaling states."""
_MAX_DIVISORS = 4096
"""Maximum number of divisors of the rotary frequencies."""
_TYPES = ("default", "none", "linear", "dynamic", "llama3", "yarn", "longrope", "su")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A rule that scales rotary angles (RoPE). ``type`` names the rule; ``agent/layers/rotary.py`` computes it.

    ``linear`` divides every frequency by ``factor`` (Chen et al. 2023). ``dynamic`` raises the base of positions after
    the trained context (NTK-aware scaling, bloc97 and emozilla 2023). ``llama3`` divides low frequencies by ``factor``,
    keeps high frequencies, and interpolates between the two. ``yarn`` does the same as ``llama3``, but with other
    limits, and also scales cosines and sines (Peng et al. 2023). ``longrope`` divides each frequency by a number of its
    own (Ding et al. 2024). A rule ignores the fields of other rules.
    """

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Number of tokens of the context with which the model was trained."""
    beta_fast: float = 32.0
    """``yarn``: frequencies with at least this number of rotations in the trained context stay unchanged."""
    beta_slow: float = 1.0
    """``yarn``: frequencies with at most this number of rotations in the trained context are divided by ``factor``."""
    truncate: bool = True
    """``yarn``: if True, the range of head dimensions between ``beta_fast`` and ``beta_slow`` is widened to whole
    numbers."""
    attention_factor: float = 1.0
    """``yarn`` and ``longrope``: cosines and sines are multiplied by this factor."""
    short_factors: tuple[float, ...] = ()
    """``longrope``: divisors of the frequencies, if no sequence can become longer than the trained context."""
    long_factors: tuple[float, ...] = ()
    """``longrope``: divisors of the frequencies, if sequences can become longer than the trained context."""

    def max_positions(self, max_position_embeddings: int) -> int:
        """Returns the maximum length of a sequence with the scaling.

        For ``dynamic`` and ``yarn``, some files state the length without the scaling as ``max_position_embeddings``. So
        the result is at least the trained context times ``factor``.
        """
        if self.type in ("dynamic", "yarn"):
            stretched = int(self.original_max_position_embeddings * self.factor)
            return min(max(max_position_embeddings, stretched), MAX_POSITIONS)
        return max_position_embeddings


def read_rope_scaling(
    rope: TypedFields, max_position_embeddings: int, original: int | None = None
) -> RopeScaling | None:
    """Returns the scaling in ``rope``, or None if there is none. Raises the error class of ``rope`` for a wrong value.

    ``rope`` is the mapping ``rope_scaling`` of ``config.json``, or the newer ``rope_parameters``. ``original`` is the
    trained context that ``config.json`` states outside of this mapping, for ``longrope``.
    """
    rope.refuse_nested()
    kind = rope.text("rope_type" if "rope_type" in rope else "type", "default", _TYPES)
    if kind in ("default", "none"):
        return None
    if kind in ("longrope", "su"):
        return _longrope(rope, max_position_embeddings, original)
    factor = rope.number("factor", None, 0.0, _MAX_FACTOR)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "dynamic":
        if factor < 1.0:
            raise rope.fail("factor", "must be at least 1")
        return RopeScaling("dynamic", factor, original_max_position_embeddings=max_position_embeddings)
    return _llama3(rope, factor) if kind == "llama3" else _yarn(rope, factor, max_position_embeddings)


def read_rotary_sections(rope: TypedFields, head_dim: int) -> tuple[int, ...]:
    """Returns ``mrope_section``: how many frequencies belong to time, height and width (arXiv:2409.12191, section 2.1).

    ``rope`` is the mapping ``rope_scaling`` or ``rope_parameters``. Raises its error class if the key is missing or
    wrong.
    """
    key = "mrope_section"
    sections = rope.value(key)
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(each) is int and each >= 0 for each in sections)
        or sum(sections) != head_dim // 2
    ):
        raise rope.fail(key, f"must be three numbers that sum to half of the head size, which is {head_dim // 2}")
    return tuple(sections)


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


def _longrope(rope: TypedFields, max_position_embeddings: int, original: int | None) -> RopeScaling:
    key = "original_max_position_embeddings"
    trained = rope.integer(key, original or max_position_embeddings, 1, MAX_POSITIONS)
    factor = rope.number("factor", max_position_embeddings / trained, 0.0, _MAX_FACTOR)
    default = 1.0 if factor <= 1.0 or trained == 1 else math.sqrt(1.0 + math.log(factor) / math.log(trained))
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=trained,
        attention_factor=rope.number("attention_factor", default, 0.0, 1000.0),
        short_factors=_divisors(rope, "short_factor"),
        long_factors=_divisors(rope, "long_factor"),
    )


def _divisors(rope: TypedFields, key: str) -> tuple[float, ...]:
    values = rope.value(key)
    if not isinstance(values, list) or not values or len(values) > _MAX_DIVISORS:
        raise rope.fail(key, "must be a list of numbers, one for each rotary frequency")
    if not all(type(value) in (int, float) and 0 < value <= _MAX_FACTOR for value in values):
        raise rope.fail(key, f"every number must be above 0, at most {_MAX_FACTOR:g}")
    return tuple(float(value) for value in values)


def _attention_factor(rope: TypedFields, factor: float) -> float:
    """Returns the factor by which YaRN multiplies cosines and sines.

    It is ``attention_factor`` if the file has this key. Otherwise it is f(1) = 0.1 x ln(``factor``) + 1, as the paper
    recommends. If the file has DeepSeek's two keys, it is f(``mscale``) / f(``mscale_all_dim``), with f(m) = 0.1 x m x
    ln(``factor``) + 1.
    """
    if "attention_factor" in rope:
        return rope.number("attention_factor", None, 0.0, 1000.0)
    if "mscale" in rope and "mscale_all_dim" in rope:
        scales = [rope.number(key, None, 0.0, 1000.0) for key in ("mscale", "mscale_all_dim")]
        return _fitted(factor, scales[0]) / _fitted(factor, scales[1])
    return _fitted(factor, 1.0)


def _fitted(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
