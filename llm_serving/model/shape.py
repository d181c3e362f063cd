"""The sizes of a model. They are read from a Hugging Face folder or a MindFormers YAML, and checked before the weights
are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.gguf.model_config import model_fields
from llm_serving.gguf.place import own_config
from llm_serving.model.deepseek import MAX_EXTRA_LAYERS, LatentAttention
from llm_serving.model.families import (
    FAMILIES,
    BesideEncoder,
    Experts,
    Family,
    family_of,
    read_biases,
    read_experts,
    read_latent,
    read_window,
    text_part,
)
from llm_serving.model.gated_delta import GatedDelta, read_gated_delta, with_delta_defaults
from llm_serving.model.gemma import Gemma, as_llama, read_gemma
from llm_serving.model.gpt_oss import with_defaults
from llm_serving.model.quantization import read_quantization
from llm_serving.model.rope import MAX_POSITIONS, RopeScaling, read_rope_scaling, read_rotary_sections
from llm_serving.model.vision import QWEN_TEXT, VisionShape, read_vision, text_fields

MAX_CONFIG_JSON_BYTES = 1024 * 1024
"""Maximum size in bytes of ``config.json``, and of ``generation_config.json``."""
MAX_HIDDEN_SIZE = 65_536
"""Maximum hidden size of a model."""
MAX_LAYERS = 1_024
"""Maximum number of layers of a model."""
MAX_HEADS = 1_024
"""Maximum number of attention heads of a layer."""
MAX_HEAD_DIM = 512
"""Maximum size of an attention head."""
MAX_VOCAB_SIZE = 4 * 1024 * 1024
"""Maximum number of tokens of a vocabulary."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes the sizes and the arithmetic of a model, without its weights."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    hidden_act: str
    attention_bias: bool
    """If True, query, key and value have biases."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    output_bias: bool = False
    """If True, attention's output layer has a bias."""
    query_key_norm: bool = False
    """If True, each query and key head has an RMSNorm before its rotation."""
    sliding_window: int = 0
    """Number of tokens that a token attends to, including itself. 0: all earlier tokens."""
    full_attention_layers: tuple[int, ...] = ()
    """Indices of the layers that attend to all earlier tokens although the model has a sliding window."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """Sizes of latent attention (``head_dim`` is then the size of a query head). None for ordinary attention."""
    gemma: Gemma | None = None
    """The parts of a Gemma. None for all other families."""
    delta: GatedDelta | None = None
    """Sizes of the layers with linear attention. None if every layer has full or latent attention."""
    beside_encoder: bool = False
    """If True, the checkpoint also has an encoder of images, which is not loaded."""
    sinks: bool = False
    """If True, the softmax of each query head has one more term, a learned score without a value (attention sink)."""
    partial_rotary_dim: int = 0
    """Number of a head's elements that are rotated, from the first one on. 0: all."""
    num_extra_layers: int = 0
    """Number of MTP layers (multi-token prediction) that DeepSeek's checkpoints have after the last layer. Only
    speculative decoding with the method ``mtp`` uses these layers. 0 for other families."""
    vision: VisionShape | None = None
    """The vision encoder. None for a model that reads only text."""
    rotary_sections: tuple[int, ...] = ()
    """Numbers of rotary frequencies for time, height and width, if positions have three dimensions. Else empty."""

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements of a head."""
        if self.latent is not None:
            return self.latent.rope_dim
        return self.partial_rotary_dim or self.head_dim

    @property
    def encoder_beside(self) -> BesideEncoder | None:
        """The names in a checkpoint that also has an encoder of images, which is not loaded. None for others."""
        return FAMILIES[self.architecture].beside_encoder if self.beside_encoder else None

    @property
    def norm_dtype(self) -> str | None:
        """Type of the norms' weights. None: ``model_dtype``."""
        return "float32" if self.adds_one_to_norms else None

    @property
    def shares_output(self) -> bool:
        """True if the output layer and the embedding can share one parameter in memory.

        Gemma needs two parameters: its embedding is multiplied by a factor when it is loaded, and its output layer is
        not.
        """
        return self.tie_word_embeddings and self.gemma is None

    @property
    def adds_one_to_norms(self) -> bool:
        """True if the norms multiply by 1 + the stored weight, in float32."""
        return self.gemma is not None or FAMILIES[self.architecture].hybrid

    @property
    def gated_attention(self) -> bool:
        """True if the result of full attention is multiplied by the sigmoid of a gate, which the query layer computes.

        Also true for the MTP layer of a hybrid, which has no linear attention (``delta`` is None).
        """
        return FAMILIES[self.architecture].hybrid

    def has_cache(self, layer: int) -> bool:
        """Returns whether a layer has a KV cache. A layer with linear attention has a state for each sequence."""
        return self.delta is None or layer in self.delta.full_layers

    @property
    def num_cache_layers(self) -> int:
        """Number of layers with a KV cache."""
        return self.num_layers if self.delta is None else len(self.delta.full_layers)

    @property
    def num_cache_arrays(self) -> int:
        """Number of arrays of the KV cache: keys and values of each layer, or the latent vectors of each layer."""
        return self.num_cache_layers * (2 if self.latent is None else 1)

    def state_bytes(self, max_logged: int) -> int:
        """Returns the bytes of a sequence's state in all layers with linear attention. 0 if there are none.

        ``max_logged`` is the number of drafts in the log of a state.
        """
        if self.delta is None:
            return 0
        return 4 * (self.num_layers - self.num_cache_layers) * self.delta.state_floats(max_logged)

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer uses Gemma's second rotary embedding, which belongs to the layers with a window."""
        return self.gemma is not None and self.window_of(layer) > 0

    @property
    def rotary_width(self) -> int:
        """Number of elements in a row of the rotary tables. A row covers a whole head, even if only a part is rotated.

        With latent attention, a row covers only the rotated part.
        """
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Size of a value head, which is also the size of a head in the result of attention."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def window_of(self, layer: int) -> int:
        """Returns the number of tokens that a token attends to in a layer. 0: all earlier tokens."""
        return 0 if layer in self.full_attention_layers else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def max_positions(self) -> int:
        """Maximum number of tokens of a sequence, with the rotary scaling."""
        scaling = self.rope_scaling
        stated = self.max_position_embeddings
        return stated if scaling is None else scaling.max_positions(stated)

    @property
    def num_parameters(self) -> int:
        """Number of weights in the checkpoint. An embedding that is also the output layer counts once."""
        return self.num_text_parameters + (0 if self.vision is None else self.vision.num_parameters(self.hidden_size))

    @property
    def num_text_parameters(self) -> int:
        """Number of weights of the text model, which is the whole model unless it reads images."""
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_linear_parameters + self._num_other_parameters + embedding

    @property
    def _num_other_parameters(self) -> int:
        """Number of parameters of norms, biases and the experts' routers."""
        query, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norms = self.num_layers * (2 if self.gemma is None else 4) * self.hidden_size
        layer = 2 * self.head_dim if self.query_key_norm else 0
        layer += query + 2 * key_value if self.attention_bias else 0
        layer += self.hidden_size if self.output_bias else 0
        layer += self.num_attention_heads if self.sinks else 0
        if self.latent is not None:
            layer += self.latent.query_rank + self.latent.rank
        routers = corrections = biases = 0
        if self.experts is not None:
            routers = (self.num_layers - len(self.experts.dense_layers)) * self.experts.count
            of_expert = 1 + 2 * self.experts.intermediate_size + self.hidden_size
            biases = routers * of_expert if self.experts.biased else 0
            corrections = routers if self.experts.routing is not None and self.experts.routing.corrected else 0
            routers += self.experts.shared_gate * (self.num_layers - len(self.experts.dense_layers))
        linear = 0
        if self.delta is not None:
            linear = (self.num_layers - self.num_cache_layers) * self.delta.num_other_parameters
        layers = norms + self.num_cache_layers * layer + linear
        return layers + (routers + 1) * self.hidden_size + corrections + biases

    @property
    def num_linear_parameters(self) -> int:
        """Number of parameters of all linear layers, with the output layer.

        The weight format applies to these parameters, except the ``num_head_parameters`` of latent attention, which
        stay floats.
        """
        mlps = self.num_layers * self.intermediate_size
        if self.experts is not None:
            dense = len(self.experts.dense_layers)
            columns = self.experts.held * self.experts.intermediate_size + self.experts.shared_size
            mlps = dense * self.intermediate_size + (self.num_layers - dense) * columns
        attention = self.num_cache_layers * self._num_attention_weights
        if self.delta is not None:
            linear = (self.delta.projected + self.delta.values) * self.hidden_size
            attention += (self.num_layers - self.num_cache_layers) * linear
        return attention + (3 * mlps + self.vocab_size) * self.hidden_size

    @property
    def num_expert_parameters(self) -> int:
        """Number of parameters of the linear layers of experts, without the shared experts."""
        if self.experts is None:
            return 0
        layers = self.num_layers - len(self.experts.dense_layers)
        return 3 * layers * self.experts.held * self.experts.intermediate_size * self.hidden_size

    @property
    def num_head_parameters(self) -> int:
        """Number of parameters of the linear functions from latent vectors to keys and values. They stay floats."""
        if self.latent is None:
            return 0
        head = (self.latent.nope_dim + self.latent.value_dim) * self.latent.rank
        return self.num_layers * self.num_attention_heads * head

    @property
    def _num_attention_weights(self) -> int:
        """Number of parameters of the linear layers of one layer's attention."""
        query, latent = self.num_attention_heads * self.head_dim, self.latent
        if latent is None:
            key_value = self.num_key_value_heads * self.head_dim
            gate = query if self.gated_attention else 0
            return self.hidden_size * (query + gate + 2 * key_value) + query * self.hidden_size
        from_hidden = latent.cache_dim + (latent.query_rank or query) + self.num_attention_heads * latent.value_dim
        return from_hidden * self.hidden_size + query * latent.query_rank + self.num_head_parameters // self.num_layers

    @classmethod
    def from_path(cls, path: Path) -> ModelShape:
        """Reads the sizes of a Hugging Face folder, or of a GGUF file without a ``config.json``.

        Raises CheckpointError with file, key and value.
        """
        gguf = own_config(path)
        if gguf is None:
            return cls.from_hf_folder(path)
        fields = model_fields(gguf)
        return shape_of_fields(fields, fields)

    @classmethod
    def from_hf_folder(cls, path: str | Path) -> ModelShape:
        """Reads ``config.json`` (and the end tokens of ``generation_config.json``) of a Hugging Face folder.

        Raises CheckpointError with file, key and value if a value is missing, wrong or not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            problem = "is not a model: name a folder or a *.gguf file" if folder.exists() else "no such folder"
            raise CheckpointError(f"{folder}: {problem}")
        values = read_json_object(folder / "config.json", MAX_CONFIG_JSON_BYTES, CheckpointError)
        generation_file = folder / "generation_config.json"
        generation: dict[str, object] = {}
        if generation_file.exists():
            generation = read_json_object(generation_file, MAX_CONFIG_JSON_BYTES, CheckpointError)
        return shape_of_fields(
            TypedFields(str(folder / "config.json"), values, CheckpointError),
            TypedFields(str(generation_file), generation, CheckpointError),
        )


def check_head_sizes(fields: TypedFields, shape: ModelShape, heads: str, kv_heads: str) -> None:
    """Checks the number of heads and the size of a head.

    The number of key-value heads must divide the number of query heads, and rotary embedding needs an even head size.
    Otherwise raises the error class of ``fields``. ``heads`` and ``kv_heads`` are the keys in the file, for messages.
    """
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise fields.fail(kv_heads, f"must divide {heads} = {shape.num_attention_heads}")
    if shape.partial_rotary_dim % 2:
        key = "partial_rotary_factor"
        raise fields.fail(key, f"rotates {shape.rotary_dim} of {shape.head_dim} elements; it must be an even number")
    if shape.rotary_width % 2:
        raise fields.fail("head_dim", f"the head size is {shape.rotary_width}; rotary embedding needs an even one")
    scaling = shape.rope_scaling
    if scaling is not None and scaling.type == "longrope":
        for name in ("short_factors", "long_factors"):
            found = len(getattr(scaling, name))
            if found != shape.rotary_dim // 2:
                problem = (
                    f"{name.removesuffix('s')} has {found} numbers; {shape.rotary_dim // 2} frequencies need one each"
                )
                raise fields.fail("rope_scaling", problem)


def head_dim_of(fields: TypedFields, hidden_size: int, num_heads: int, heads: str, default: int | None = None) -> int:
    """Returns ``head_dim`` of the file, else the family's ``default``, else ``hidden_size`` / ``num_heads``.

    Raises the error class of ``fields`` if the third value is needed and ``num_heads`` does not divide ``hidden_size``.
    ``heads`` is the key of the number of heads, for messages.
    """
    if default is not None:
        return fields.integer("head_dim", default, 1, MAX_HEAD_DIM)
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.fail(heads, f"does not divide hidden_size = {hidden_size}, and there is no head_dim")
    return fields.integer("head_dim", hidden_size // num_heads, 1, MAX_HEAD_DIM)


def shape_of_fields(
    fields: TypedFields, generation: TypedFields, *, activations: tuple[str, ...] = ("silu",)
) -> ModelShape:
    """Returns the model's shape from ``config.json``, or from a section of a MindFormers YAML with the same keys.

    If ``generation`` (``generation_config.json``) states end tokens, they take precedence. ``activations`` are the
    accepted values of ``hidden_act``.
    """
    text = text_part(fields)
    whole = fields if text is None else text
    family = family_of(whole)
    fields = _fields_of_text_model(whole, family)
    fields.text("hidden_act", "silu", ("gelu_pytorch_tanh",) if family.gemma else activations)
    hidden = fields.integer("hidden_size", None, 1, MAX_HIDDEN_SIZE)
    heads = fields.integer("num_attention_heads", None, 1, MAX_HEADS)
    num_layers = fields.integer("num_hidden_layers", None, 1, MAX_LAYERS)
    positions = fields.integer("max_position_embeddings", 2048, 1, MAX_POSITIONS)
    vocab_size = fields.integer("vocab_size", None, 1, MAX_VOCAB_SIZE)
    is_grid = family.vision == QWEN_TEXT
    rope = _rope_fields(fields, is_grid=is_grid)
    biases, (window, full_layers) = read_biases(fields, family), read_window(fields, family, num_layers)
    latent = read_latent(fields, family, heads)
    head_dim = _head_dim(fields, family, latent, hidden, heads)
    experts = read_experts(fields, family, num_layers)
    shape = ModelShape(
        architecture=family.architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", _unused_size(experts), 1, 8 * MAX_HIDDEN_SIZE),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads, 1, MAX_HEADS),
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        rope_theta=(rope if "rope_theta" in rope else fields).number("rope_theta", 10_000.0, 0.0, 1e12),
        rope_scaling=read_rope_scaling(rope, positions, _original_positions(fields)),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        max_position_embeddings=positions,
        hidden_act="gelu_tanh" if family.gemma else "silu",
        attention_bias=biases[0],
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=(generation if "eos_token_id" in generation else fields).token_ids("eos_token_id", vocab_size),
        pad_token_id=_pad_token_id(fields, vocab_size),
        output_bias=biases[1],
        query_key_norm=family.query_key_norm,
        sliding_window=window,
        full_attention_layers=full_layers,
        experts=experts,
        latent=latent,
        gemma=read_gemma(fields) if family.gemma else None,
        delta=read_gated_delta(fields, num_layers) if family.hybrid else None,
        beside_encoder=text is not None,
        sinks=family.gpt_oss,
        partial_rotary_dim=_partial_rotary_dim(fields, rope, family, head_dim),
        num_extra_layers=fields.integer("num_nextn_predict_layers", 0, 0, MAX_EXTRA_LAYERS) if family.deepseek else 0,
        vision=read_vision(whole, vocab_size, hidden, family.vision) if family.vision else None,
        rotary_sections=read_rotary_sections(rope, head_dim) if is_grid else (),
    )
    check_head_sizes(fields, shape, "num_attention_heads", "num_key_value_heads")
    return shape


def _unused_size(experts: Experts | None) -> int | None:
    """Returns the default of ``intermediate_size``. None: the key must be present.

    If every layer has experts, no layer has an MLP of this size, and the key may be missing, as in Qwen3.5. The default
    is then the size of an expert.
    """
    return None if experts is None or experts.dense_layers else experts.intermediate_size


def _fields_of_text_model(fields: TypedFields, family: Family) -> TypedFields:
    """Returns the text model's fields, with the names and defaults of Llama. Checks the quantization."""
    read_quantization(fields)
    if family.vision:
        fields = text_fields(fields, family.vision)
    if family.gemma:
        fields = as_llama(fields, fields.integer("num_hidden_layers", None, 1, MAX_LAYERS))
    if family.hybrid:
        fields = with_delta_defaults(fields)
    if family.gpt_oss:
        fields = with_defaults(fields, fields.integer("num_hidden_layers", None, 1, MAX_LAYERS))
    return fields


def _rope_fields(fields: TypedFields, *, is_grid: bool) -> TypedFields:
    """Returns the section of ``config.json`` about rotary positions.

    ``is_grid`` is True if the positions have three dimensions (M-RoPE).
    """
    rope = fields.mapping("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    return rope.with_value("type", "default") if is_grid and rope.value("type") == "mrope" else rope


def _head_dim(
    fields: TypedFields, family: Family, latent: LatentAttention | None, hidden_size: int, num_heads: int
) -> int:
    if latent is not None:
        return latent.head_dim
    return head_dim_of(fields, hidden_size, num_heads, "num_attention_heads", family.head_dim)


def _original_positions(fields: TypedFields) -> int | None:
    key = "original_max_position_embeddings"
    return fields.integer(key, None, 1, MAX_POSITIONS) if key in fields else None


def _partial_rotary_dim(fields: TypedFields, rope: TypedFields, family: Family, head_dim: int) -> int:
    """Returns the number of rotated elements of a head, or 0 if all are rotated."""
    key = "partial_rotary_factor"
    for place in (rope, fields):
        factor = place.number(key, 1.0, 0.0, 1.0)
        if factor == 1.0:
            continue
        if not family.partial_rotary:
            raise place.fail(key, "is not supported; every head dimension is rotated")
        if int(head_dim * factor) < 2:
            raise place.fail(key, f"rotates less than 2 of the {head_dim} elements of a head")
        return int(head_dim * factor)
    return 0


def _pad_token_id(fields: TypedFields, vocab_size: int) -> int | None:
    """Returns the padding token, or None.

    Some files state -1 or an id outside the vocabulary. They count as files without a padding token.
    """
    pad = fields.integer("pad_token_id", -1, -1, MAX_VOCAB_SIZE)
    return pad if 0 <= pad < vocab_size else None
