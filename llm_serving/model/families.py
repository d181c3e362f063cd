"""The supported model families, and the keys of ``config.json`` in which they differ from a Llama.

``agent/models/llama.py`` is the network of all of them. ``docs/models.md`` has a table for users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llm_serving.formats.typed_fields import TypedFields
from llm_serving.model.deepseek import (
    MAX_SHARED_EXPERTS,
    LatentAttention,
    Routing,
    read_dense_layers,
    read_latent_attention,
    read_routing,
)
from llm_serving.model.gpt_oss import ACTIVATION

MAX_EXPERTS = 4096
"""Maximum number of experts of a layer."""
MAX_WINDOW = 16 * 1024 * 1024
"""Maximum size of a sliding window, in tokens."""
_MAX_INTERMEDIATE_SIZE = 8 * 65_536
"""Maximum inner size of an expert, and of the shared experts of a layer."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Names of the keys of ``config.json`` that describe a family's experts."""

    count: str
    intermediate_size: str
    biased: bool = False
    """If True, the router and the linear layers of experts have biases."""
    activation: str = "silu"
    """The activation of the experts, a key of ``agent.kernels.packing.GATES``."""
    normalised: bool = False
    """If True, a token's expert weights always sum to 1, and every layer has experts. ``norm_topk_prob`` is ignored."""
    shared_size: str = ""
    """Key of the intermediate size of the shared expert. Every token passes this expert, and a gate multiplies the
    output of the expert. "": no shared expert.
    """


LANGUAGE_MODEL = "model.language_model."
"""Prefix of the modules of a text model in transformers if the model also has an encoder of images."""


@dataclass(frozen=True, slots=True)
class BesideEncoder:
    """Describes folders that have an image encoder in addition to a text model (``text_config``).

    Only the text model is used. In folders without an encoder, the names of its tensors begin with ``model.``.
    """

    architecture: str
    """The name in ``architectures`` of ``config.json``."""
    text_prefix: str
    """Prefix of the names of the text model's tensors."""
    encoder_prefixes: tuple[str, ...]
    """Prefixes of the names of all other tensors. They are not loaded."""


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of a model family from a Llama. CONTRIBUTING.md has the steps to add a family."""

    architecture: str
    model_type: str
    biases: Literal["stated", "query_key_value"] = "stated"
    """Which linear layers of attention have biases. ``stated``: all four if ``attention_bias`` is true, otherwise none.
    ``query_key_value``: those of query, key and value."""
    query_key_norm: bool = False
    """If True, each query and key head has an RMSNorm."""
    window: Literal["none", "always", "switched"] = "none"
    """Meaning of the key ``sliding_window``. ``none``: the key is ignored. ``always``: every layer has the window.
    ``switched``: layers from ``max_window_layers`` on have the window if ``use_sliding_window`` is true."""
    partial_rotary: bool = False
    """If True, ``partial_rotary_factor`` states which part of a head is rotated. Otherwise the key is refused."""
    joined: bool = False
    """If True, the checkpoint stores query, key and value as one tensor, and gate and up as one tensor."""
    head_dim: int | None = None
    """Default size of a head. None: hidden size / heads."""
    experts: ExpertKeys | None = None
    """The keys of ``config.json`` about experts. None if the family has no experts."""
    gemma: bool = False
    """If True, the model has the parts that ``llm_serving.model.gemma.Gemma`` describes."""
    gpt_oss: bool = False
    """If True, attention has sinks, and ``llm_serving.model.gpt_oss`` has the defaults of ``config.json``."""
    beside_encoder: BesideEncoder | None = None
    """The folders that have an image encoder in addition to a text model of this family. None if there are none."""
    hybrid: bool = False
    """If True, most layers have Gated DeltaNet (``llm_serving.model.gated_delta``). The other layers have full
    attention with an output gate."""
    deepseek: Literal["", "v2", "v3"] = ""
    """Version of DeepSeek whose latent attention and experts the model has. "": the model has neither."""
    vision: str = ""
    """``model_type`` of the text model if the model reads images (``llm_serving.model.vision``). Otherwise empty."""


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama"),
        Family("MistralForCausalLM", "mistral", window="always"),
        Family(
            "MixtralForCausalLM",
            "mixtral",
            window="always",
            experts=ExpertKeys("num_local_experts", "intermediate_size", normalised=True),
        ),
        Family("Qwen2ForCausalLM", "qwen2", biases="query_key_value", window="switched"),
        Family("Qwen3ForCausalLM", "qwen3", query_key_norm=True, window="switched", head_dim=128),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            query_key_norm=True,
            window="always",
            gemma=True,
            beside_encoder=BesideEncoder(
                "Gemma3ForConditionalGeneration",
                "language_model.model.",
                ("vision_tower.", "multi_modal_projector."),
            ),
        ),
        Family("Phi3ForCausalLM", "phi3", window="always", partial_rotary=True, joined=True),
        Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            query_key_norm=True,
            window="switched",
            experts=ExpertKeys("num_experts", "moe_intermediate_size"),
        ),
        Family(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            query_key_norm=True,
            partial_rotary=True,
            head_dim=256,
            experts=ExpertKeys(
                "num_experts", "moe_intermediate_size", shared_size="shared_expert_intermediate_size"
            ),
            hybrid=True,
        ),
        Family(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            query_key_norm=True,
            partial_rotary=True,
            head_dim=256,
            hybrid=True,
            beside_encoder=BesideEncoder("Qwen3_5ForConditionalGeneration", LANGUAGE_MODEL, ("model.visual.",)),
        ),
        Family(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            query_key_norm=True,
            partial_rotary=True,
            head_dim=256,
            experts=ExpertKeys(
                "num_experts",
                "moe_intermediate_size",
                normalised=True,
                shared_size="shared_expert_intermediate_size",
            ),
            hybrid=True,
            beside_encoder=BesideEncoder("Qwen3_5MoeForConditionalGeneration", LANGUAGE_MODEL, ("model.visual.",)),
        ),
        Family(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            experts=ExpertKeys("n_routed_experts", "moe_intermediate_size"),
            deepseek="v2",
        ),
        Family(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            experts=ExpertKeys("n_routed_experts", "moe_intermediate_size"),
            deepseek="v3",
        ),
        Family(
            "GptOssForCausalLM",
            "gpt_oss",
            window="always",
            experts=ExpertKeys(
                "num_local_experts", "intermediate_size", biased=True, activation=ACTIVATION, normalised=True
            ),
            gpt_oss=True,
        ),
        Family("Idefics3ForConditionalGeneration", "idefics3", vision="llama"),
        Family("SmolVLMForConditionalGeneration", "smolvlm", vision="llama"),
        Family(
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            biases="query_key_value",
            window="switched",
            vision="qwen2_5_vl_text",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts instead of the MLP. A router sends each token to a few small MLPs (Shazeer et al., 2017)."""

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    """If True, a token's expert weights are divided by their sum (``norm_topk_prob``)."""
    dense_layers: tuple[int, ...] = ()
    """Indices of the layers that have an ordinary MLP instead of experts."""
    routing: Routing | None = None
    """How a layer's router chooses the experts of a token. None: the largest values of a softmax over all experts."""
    biased: bool = False
    """If True, the router and the linear layers of experts have biases."""
    activation: str = "silu"
    """The activation of the experts, a key of ``agent.kernels.packing.GATES``."""
    shared_size: int = 0
    """Intermediate size of the MLP that every token passes in addition (DeepSeek's shared experts). 0: none."""
    shared_gate: bool = False
    """If True, a gate multiplies the output of the shared experts: the sigmoid of a linear function of the token."""
    first_held: int = 0
    """The first expert whose weights this part of the model has."""
    num_held: int | None = None
    """Number of experts whose weights this part of the model has. None: all."""

    @property
    def held(self) -> int:
        """Number of experts whose weights this part of the model has."""
        return self.count if self.num_held is None else self.num_held


GENERATOR, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
"""Endings of architecture names: for a model that generates text, and for a classifier with the same network."""


def family_of(fields: TypedFields) -> Family:
    """Returns the family that ``architectures`` of ``config.json`` names, or ``model_type`` if there are no
    architectures.

    For a classifier, this is the family of the text generator with the same network. Raises the error class of
    ``fields`` for an unknown family.
    """
    names = fields.names("architectures")
    if not names:
        by_type = {family.model_type: family for family in FAMILIES.values()}
        return by_type[fields.text("model_type", "", tuple(by_type))]
    for name in names:
        if name.endswith(CLASSIFIER):
            name = name.removesuffix(CLASSIFIER) + GENERATOR
        if name in FAMILIES:
            return FAMILIES[name]
    raise fields.fail("architectures", f"is not supported; only {', '.join(FAMILIES)}")


def text_part(fields: TypedFields) -> TypedFields | None:
    """Returns the fields of the text model of a folder that also has an encoder of images. None for other folders.

    Raises the error class of ``fields`` if there is no text model.
    """
    names = fields.names("architectures")
    pairs = [(each, each.beside_encoder) for each in FAMILIES.values()]
    family = next((each for each, encoder in pairs if encoder is not None and encoder.architecture in names), None)
    if family is None:
        return None
    text = fields.mapping("text_config")
    if not text:
        raise fields.fail("text_config", "is missing; it has the sizes of the text model")
    for key in ("tie_word_embeddings", "quantization_config"):
        text = text.with_value(key, fields.value(key)) if key in fields else text
    if "eos_token_id" not in text and "eos_token_id" in fields:
        text = text.with_value("eos_token_id", fields.value("eos_token_id"))
    return text.with_value("architectures", [family.architecture])


def read_biases(fields: TypedFields, family: Family) -> tuple[bool, bool]:
    """Returns whether query, key and value have biases, and whether attention's output layer has a bias."""
    if fields.boolean("mlp_bias", False):
        raise fields.fail("mlp_bias", "is not supported; the MLP's linear layers have no bias")
    if family.biases == "query_key_value":
        return True, False
    stated = fields.boolean("attention_bias", False)
    return stated, stated


def read_window(fields: TypedFields, family: Family, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Returns the sliding window in tokens (0: no window), and the indices of layers without a window."""
    is_on = family.window == "always" or (family.window == "switched" and fields.boolean("use_sliding_window", False))
    types = () if family.hybrid else fields.names("layer_types")
    if types and (len(types) != num_layers or not set(types) <= {_FULL, _SLIDING}):
        raise fields.fail("layer_types", f"must be a list of {num_layers} entries, each {_FULL} or {_SLIDING}")
    window = fields.integer("sliding_window", 0, 0, MAX_WINDOW) if is_on else 0
    if window == 0:
        if _SLIDING in types:
            raise fields.fail("layer_types", f"has {_SLIDING}, but sliding_window is missing or off")
        return 0, ()
    if types:
        full = tuple(index for index, kind in enumerate(types) if kind == _FULL)
    elif family.window == "switched" and family.experts is None:
        full = tuple(range(min(num_layers, fields.integer("max_window_layers", 28, 0, 1 << 20))))
    else:
        full = ()
    return (0, ()) if len(full) == num_layers else (window, full)


def read_experts(fields: TypedFields, family: Family, num_layers: int) -> Experts | None:
    """Returns the experts of a model, or None if no layer has any."""
    keys = family.experts
    if keys is None:
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if fields.integer(key, 0, 0, 1 << 20) > 1:
                known = " and ".join(name for name, each in FAMILIES.items() if each.experts is not None)
                raise fields.fail(key, f"must not be above 1: {family.architecture} has no experts; {known} have")
        return None
    if family.deepseek:
        return _read_deepseek_experts(fields, family, num_layers)
    count = fields.integer(keys.count, None, 1, MAX_EXPERTS)
    dense = () if keys.normalised else _dense_layers(fields, num_layers)
    if len(dense) == num_layers:
        return None
    shared_size = fields.integer(keys.shared_size, 512, 1, _MAX_INTERMEDIATE_SIZE) if keys.shared_size else 0
    return Experts(
        count=count,
        per_token=fields.integer("num_experts_per_tok", None, 1, count),
        intermediate_size=fields.integer(keys.intermediate_size, None, 1, _MAX_INTERMEDIATE_SIZE),
        normalised=keys.normalised or fields.boolean("norm_topk_prob", False),
        biased=keys.biased,
        activation=keys.activation,
        dense_layers=dense,
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )


def _read_deepseek_experts(fields: TypedFields, family: Family, num_layers: int) -> Experts | None:
    keys, is_v3 = family.experts, family.deepseek == "v3"
    assert keys is not None, "DeepSeek's families name the keys of their experts"
    if keys.count not in fields:
        return None
    dense = read_dense_layers(fields, num_layers)
    if len(dense) == num_layers:
        return None
    count = fields.integer(keys.count, None, 1, MAX_EXPERTS)
    per_token = fields.integer("num_experts_per_tok", None, 1, count)
    size = fields.integer(keys.intermediate_size, None, 1, _MAX_INTERMEDIATE_SIZE)
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        normalised=fields.boolean("norm_topk_prob", is_v3),
        dense_layers=dense,
        routing=read_routing(fields, count, per_token, corrected=is_v3),
        shared_size=size * fields.integer("n_shared_experts", 0, 0, MAX_SHARED_EXPERTS),
    )


def read_latent(fields: TypedFields, family: Family, num_heads: int) -> LatentAttention | None:
    """Returns the sizes of latent attention, or None if the family has ordinary attention."""
    if not family.deepseek:
        return None
    return read_latent_attention(fields, num_heads, has_interleave_key=family.deepseek == "v3")


def _dense_layers(fields: TypedFields, num_layers: int) -> tuple[int, ...]:
    step = fields.integer("decoder_sparse_step", 1, 1, 1 << 20)
    named = _layer_indices(fields, "mlp_only_layers")
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)


def _layer_indices(fields: TypedFields, key: str) -> tuple[int, ...]:
    value = fields.value(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        raise fields.fail(key, "must be a list of layer numbers")
    return tuple(value)
