"""The keys of ``config.json`` that only DeepSeek V2 and V3 have: latent attention and the routing of tokens to experts.

Sources: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437), and their classes in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm_serving.formats.typed_fields import TypedFields

MAX_RANK = 16_384
"""Largest rank of latent attention that can be read."""
MAX_HEAD_PART = 4_096
"""Maximum value of ``nope_dim``, of ``rope_dim`` and of ``value_dim``."""
MAX_SHARED_EXPERTS = 1_024
"""Maximum number of shared experts of a layer."""
MAX_EXTRA_LAYERS = 64
"""Maximum number of layers for multi-token prediction."""
_MAX_FACTOR = 1e6
"""Largest value of ``routed_scaling_factor``, and of ``factor`` and ``mscale_all_dim`` of the rotary scaling."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA).

    For each token, the cache of a layer has a latent vector of ``rank`` elements and one rotated key of ``rope_dim``
    elements. All heads share both. A head's key is a linear function of the latent vector, followed by the rotated key.
    A head's value is another linear function of the latent vector.
    """

    query_rank: int
    """Size of the latent vector that queries are computed from (``q_lora_rank``). 0: queries have no latent vector."""
    rank: int
    """Size of the latent vector in the cache (``kv_lora_rank``)."""
    nope_dim: int
    """Elements of a query or key head that are not rotated (``qk_nope_head_dim``)."""
    rope_dim: int
    """Elements of a query or key head that are rotated (``qk_rope_head_dim``)."""
    value_dim: int
    """Size of a value head (``v_head_dim``)."""
    interleaved: bool = True
    """True: adjacent elements are rotated as a pair. False: element i and element i + ``rope_dim`` / 2 are a pair."""
    score_factor: float = 1.0
    """Factor by which attention scores are multiplied, in addition to 1 / sqrt(head size). YaRN's ``mscale_all_dim``
    sets it.
    """

    @property
    def head_dim(self) -> int:
        """Size of a query head, and of a key head."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Number of elements that the cache of a layer has for each token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Routing:
    """How a DeepSeek layer's router chooses the experts of a token.

    Models whose router is a plain softmax over all experts do not use this class.

    The experts are divided into ``groups`` of equal size. Only experts of the ``chosen_groups`` best groups may be
    chosen. The score of a group is the largest score of its experts or, if ``corrected`` is True, the sum of the two
    largest.
    """

    sigmoid: bool = False
    """True: the score of an expert is the sigmoid of its logit. False: the softmax over all experts."""
    groups: int = 1
    chosen_groups: int = 1
    corrected: bool = False
    """If True, experts and groups are chosen by score + ``e_score_correction_bias``. Their weights are the scores
    alone."""
    factor: float = 1.0
    """Factor by which the experts' weights are multiplied (``routed_scaling_factor``)."""


def read_latent_attention(fields: TypedFields, num_heads: int, *, has_interleave_key: bool) -> LatentAttention:
    """Returns the sizes of latent attention. Raises the error class of ``fields`` for a missing or unsupported value.

    ``has_interleave_key`` is True if the family has the key ``rope_interleave``. Without the key, rotation is
    interleaved.
    """
    if fields.boolean("attention_bias", False):
        raise fields.fail("attention_bias", "is not supported; latent attention has no biases here")
    if fields.integer("num_key_value_heads", num_heads, 1, 1 << 20) != num_heads:
        raise fields.fail("num_key_value_heads", f"must be num_attention_heads = {num_heads} for latent attention")
    latent = LatentAttention(
        query_rank=fields.integer("q_lora_rank", 0, 0, MAX_RANK),
        rank=fields.integer("kv_lora_rank", None, 1, MAX_RANK),
        nope_dim=fields.integer("qk_nope_head_dim", None, 1, MAX_HEAD_PART),
        rope_dim=fields.integer("qk_rope_head_dim", None, 2, MAX_HEAD_PART),
        value_dim=fields.integer("v_head_dim", None, 1, MAX_HEAD_PART),
        interleaved=fields.boolean("rope_interleave", True) if has_interleave_key else True,
        score_factor=_score_factor(fields),
    )
    if latent.rope_dim % 2:
        raise fields.fail("qk_rope_head_dim", "must be even; pairs of elements are rotated")
    if latent.value_dim > latent.cache_dim:
        raise fields.fail("v_head_dim", f"must be at most kv_lora_rank + qk_rope_head_dim = {latent.cache_dim}")
    return latent


def _score_factor(fields: TypedFields) -> float:
    """Returns the factor that DeepSeek's YaRN scaling puts on attention scores; 1.0 without this scaling.

    The factor is the square of 0.1 x ``mscale_all_dim`` x ln(``factor``) + 1.
    """
    rope = fields.mapping("rope_parameters") if "rope_parameters" in fields else fields.mapping("rope_scaling")
    if rope.text("rope_type" if "rope_type" in rope else "type", "default") in ("default", "none"):
        return 1.0
    stated = rope.value("mscale_all_dim")
    if stated is None or stated == 0:
        return 1.0
    scale, factor = (rope.number(key, None, 0.0, _MAX_FACTOR) for key in ("mscale_all_dim", "factor"))
    return 1.0 if factor <= 1.0 else (0.1 * scale * math.log(factor) + 1.0) ** 2


def read_routing(fields: TypedFields, experts: int, per_token: int, *, corrected: bool) -> Routing:
    """Returns how a layer's router chooses the experts of a token, for DeepSeek V3 if ``corrected`` is True, else for
    V2.

    Raises the error class of ``fields`` for an unsupported method, and for groups with fewer experts than a token
    needs.
    """
    if corrected:
        fields.text("topk_method", "noaux_tc", ("noaux_tc",))
        fields.text("scoring_func", "sigmoid", ("sigmoid",))
        has_groups = True
    else:
        method = fields.text("topk_method", "greedy", ("greedy", "group_limited_greedy"))
        fields.text("scoring_func", "softmax", ("softmax",))
        has_groups = method == "group_limited_greedy"
        if fields.boolean("norm_topk_prob", False):
            problem = "is not supported for DeepSeek V2, because its implementations differ for true; use false"
            raise fields.fail("norm_topk_prob", problem)
    groups = fields.integer("n_group", None, 1, experts) if has_groups else 1
    chosen = fields.integer("topk_group", None, 1, groups) if has_groups else 1
    if experts % groups:
        raise fields.fail("n_group", f"must divide the number of experts, n_routed_experts = {experts}")
    if corrected and experts // groups < 2:
        raise fields.fail(
            "n_group", f"makes groups of {experts // groups} experts; the router needs at least 2 in each"
        )
    if chosen * (experts // groups) < per_token:
        problem = f"{chosen} groups have {chosen * (experts // groups)} experts; a token needs {per_token}"
        raise fields.fail("topk_group", problem)
    factor = fields.number("routed_scaling_factor", 1.0, 0.0, _MAX_FACTOR)
    return Routing(corrected, groups, chosen, corrected, factor)


def read_dense_layers(fields: TypedFields, num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers with an ordinary MLP: the first ``first_k_dense_replace`` layers."""
    if fields.integer("moe_layer_freq", 1, 1, 1 << 20) != 1:
        raise fields.fail("moe_layer_freq", "is not supported; only 1: every later layer has experts")
    return tuple(range(min(num_layers, fields.integer("first_k_dense_replace", 0, 0, 1 << 20))))
