"""The sizes of a model, read from a Hugging Face folder or a MindFormers YAML, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import CheckpointError, ConfigError
from llm_serving.formats.json_object import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.quantization import read_quantization

MAX_CONFIG_JSON_BYTES = 1024 * 1024
MAX_HIDDEN_SIZE = 65_536
MAX_LAYERS = 1_024
MAX_HEADS = 1_024
MAX_HEAD_DIM = 512
MAX_VOCAB_SIZE = 4 * 1024 * 1024
MAX_POSITIONS = 16 * 1024 * 1024
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary angles are stretched beyond the trained context.

    ``linear`` divides every frequency by ``factor`` (Chen et al. 2023). ``llama3`` divides low frequencies, keeps
    high ones and blends in between; the three other numbers, unused by ``linear``, bound the bands.
    """

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a Llama that decides shapes and arithmetic, but not the weights themselves."""

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
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def num_parameters(self) -> int:
        """Weights to load. A tied embedding counts once."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_linear_parameters + norms + embedding

    @property
    def num_linear_parameters(self) -> int:
        """Those of the layers' linear layers and of the output to the vocabulary: what a weight format applies to."""
        query, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * key_value) + query * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    @classmethod
    def from_hf_folder(cls, path: str | Path) -> ModelShape:
        """Read ``config.json`` (and the end tokens of ``generation_config.json``) of a Hugging Face folder.

        Raises CheckpointError naming file, key and value when something is missing, wrong or not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such model folder")
        values = read_json_object(folder / "config.json", MAX_CONFIG_JSON_BYTES, CheckpointError)
        generation_file = folder / "generation_config.json"
        generation: dict[str, object] = {}
        if generation_file.exists():
            generation = read_json_object(generation_file, MAX_CONFIG_JSON_BYTES, CheckpointError)
        return _shape_of(
            TypedFields(str(folder / "config.json"), values, CheckpointError),
            TypedFields(str(generation_file), generation, CheckpointError),
        )

    @classmethod
    def from_mindformers_yaml(cls, path: str | Path) -> ModelShape:
        """Read ``model.model_config`` of a MindFormers YAML. Raises ConfigError naming file, key and value."""
        from llm_serving.config.mindformers import read_mindformers_yaml  # that package imports this module

        shape = read_mindformers_yaml(Path(path)).shape
        if shape is None:
            raise ConfigError(f"{path}: there is no model.model_config section to take the model's sizes from")
        return shape


def check_head_sizes(fields: TypedFields, shape: ModelShape, heads: str, kv_heads: str) -> None:
    """Raise unless the heads divide as grouped-query attention and rotary embedding need. Names are the file's."""
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise fields.fail(kv_heads, f"must divide {heads} = {shape.num_attention_heads}")
    if shape.head_dim % 2:
        raise fields.fail("head_dim", f"the head size is {shape.head_dim}; rotary embedding needs an even one")


def head_dim_of(fields: TypedFields, hidden_size: int, num_heads: int, heads: str) -> int:
    """``head_dim`` if the file has it, else hidden size / heads, which must then divide."""
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.fail(heads, f"does not divide hidden_size = {hidden_size}, and there is no head_dim")
    return fields.integer("head_dim", hidden_size // num_heads, 1, MAX_HEAD_DIM)


def _shape_of(fields: TypedFields, generation: TypedFields) -> ModelShape:
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    hidden = fields.integer("hidden_size", None, 1, MAX_HIDDEN_SIZE)
    heads = fields.integer("num_attention_heads", None, 1, MAX_HEADS)
    vocab_size = fields.integer("vocab_size", None, 1, MAX_VOCAB_SIZE)
    rope = fields.mapping("rope_parameters") if "rope_parameters" in fields else fields.mapping("rope_scaling")
    theta_fields = rope if "rope_theta" in rope else fields
    end_fields = generation if "eos_token_id" in generation else fields
    first = fields.token_ids("bos_token_id", vocab_size)
    shape = ModelShape(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", None, 1, 8 * MAX_HIDDEN_SIZE),
        num_layers=fields.integer("num_hidden_layers", None, 1, MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads, 1, MAX_HEADS),
        head_dim=head_dim_of(fields, hidden, heads, "num_attention_heads"),
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        rope_theta=theta_fields.number("rope_theta", 10_000.0, 0.0, 1e12),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048, 1, MAX_POSITIONS),
        hidden_act=fields.text("hidden_act", "silu", ("silu",)),
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=first[0] if first else None,
        eos_token_ids=end_fields.token_ids("eos_token_id", vocab_size),
        pad_token_id=_pad_token_id(fields, vocab_size),
    )
    check_head_sizes(fields, shape, "num_attention_heads", "num_key_value_heads")
    return shape


def _architecture(fields: TypedFields) -> str:
    names = fields.names("architectures")
    if not names:
        fields.text("model_type", "", ("llama",))
        return SUPPORTED_ARCHITECTURES[0]
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    raise fields.fail("architectures", f"is not supported; only {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_unsupported(fields: TypedFields) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key, False):
            raise fields.fail(key, "is not supported; the linear layers have no bias")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.integer(key, 0, 0, 1 << 20) > 1:
            raise fields.fail(key, "mixture-of-experts models are not supported")
    read_quantization(fields)
    if fields.number("partial_rotary_factor", 1.0, 0.0, 1.0) != 1.0:
        raise fields.fail("partial_rotary_factor", "is not supported; every head dimension is rotated")


def _rope_scaling(rope: TypedFields) -> RopeScaling | None:
    """From ``rope_scaling`` (with ``type`` or ``rope_type``) or the newer ``rope_parameters``."""
    rope.refuse_nested()
    key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(key, "default", ("default", "none", "linear", "llama3"))
    if rope.number("partial_rotary_factor", 1.0, 0.0, 1.0) != 1.0:
        raise rope.fail("partial_rotary_factor", "is not supported; every head dimension is rotated")
    if kind in ("default", "none"):
        return None
    factor = rope.number("factor", None, 0.0, 1e6)
    if kind == "linear":
        return RopeScaling("linear", factor)
    scaling = RopeScaling(
        "llama3",
        factor,
        rope.number("low_freq_factor", None, 0.0, 1e6),
        rope.number("high_freq_factor", None, 0.0, 1e6),
        rope.integer("original_max_position_embeddings", None, 1, MAX_POSITIONS),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fail("high_freq_factor", f"must be above low_freq_factor = {scaling.low_freq_factor:g}")
    return scaling


def _pad_token_id(fields: TypedFields, vocab_size: int) -> int | None:
    """Some folders state -1 or an id past the vocabulary for "none"; nothing is ever padded, so both are taken."""
    pad = fields.integer("pad_token_id", -1, -1, MAX_VOCAB_SIZE)
    return pad if 0 <= pad < vocab_size else None
