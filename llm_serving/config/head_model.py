"""Reads draft heads of speculative decoding: EAGLE-3 heads from their own folders, MTP layers from the model's folder.

The formats are those of the published checkpoints of EAGLE-3 (arXiv:2503.01840) and DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llm_serving.config.draft_model import EAGLE, MTP, DraftModel, Head
from llm_serving.config.source import RawConfig
from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.gguf.place import find_gguf
from llm_serving.model.quantization import stored_weight_format, stored_weight_group
from llm_serving.model.shape import MAX_CONFIG_JSON_BYTES, MAX_HIDDEN_SIZE, ModelShape, shape_of_fields

_METHOD, _MODEL = "speculative_config.method", "speculative_config.model"
_ARCHITECTURE = "LlamaForCausalLM"
"""Name of the architecture of an EAGLE-3 head, for models of every family: its layer is a Llama layer."""
_LEAST_LAYERS = 4
"""Minimum number of layers of a model with an EAGLE-3 head. With fewer layers, one of the three layer numbers that
``_eagle_layers`` returns would be below 1, and no layer has this number.
"""
_UNSUPPORTED_FLAGS = ("norm_before_residual", "tie_word_embeddings", "bias", "mlp_bias")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_eagle_head(raw: RawConfig, path: Path, shape: ModelShape, *, has_weights: bool) -> DraftModel:
    """Returns the EAGLE-3 head in the folder ``path`` for a model with the sizes ``shape``.

    ``has_weights`` is False if all weights are random. Raises ConfigError if the head does not fit the model. Raises
    CheckpointError if its files cannot be used.
    """
    _check_target(raw, shape, EAGLE)
    if not path.is_dir():
        raise raw.error(_MODEL, str(path), "is not a folder; an EAGLE-3 head has a folder with config.json")
    values = read_json_object(path / "config.json", MAX_CONFIG_JSON_BYTES, CheckpointError)
    fields = TypedFields(str(path / "config.json"), values, CheckpointError)
    if not any("eagle3" in name.lower() for name in fields.names("architectures")):
        raise fields.fail("architectures", "must name an EAGLE-3 head, for example LlamaForCausalLMEagle3")
    _check_sizes(fields, shape)
    _check_layers(fields, shape)
    guessed = fields.integer("draft_vocab_size", shape.vocab_size, 1, shape.vocab_size)
    own = {key: value for key, value in values.items() if key not in _TOKEN_KEYS}
    own |= {"architectures": [_ARCHITECTURE], "vocab_size": guessed}
    head_shape = shape_of_fields(
        TypedFields(fields.source, own, CheckpointError), TypedFields(fields.source, {}, CheckpointError)
    )
    # Published heads state short contexts, because they were trained on short texts. Their rotary embedding also works
    # for longer contexts.
    head_shape = replace(head_shape, max_position_embeddings=shape.max_positions)
    layers = _eagle_layers(shape)
    if has_weights and not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path}: there are no *.safetensors files; convert pytorch_model.bin to safetensors")
    return DraftModel(str(path), head_shape, head=Head(EAGLE, layers, shape.hidden_size, shape.vocab_size))


def read_mtp_layer(raw: RawConfig, folder: Path | None, shape: ModelShape, *, has_weights: bool) -> DraftModel:
    """Returns the first MTP layer of the model in ``folder``, which has the sizes ``shape``.

    ``has_weights`` is False if all weights are random. Raises ConfigError if the model has no MTP layer.
    """
    _check_target(raw, shape, MTP)
    if not shape.num_extra_layers:
        problem = "needs MTP layers, and config.json of the model states none (num_nextn_predict_layers); set auto"
        raise raw.error(_METHOD, MTP, problem)
    if folder is not None and find_gguf(folder) is not None:
        raise raw.error(_METHOD, MTP, "cannot be used with a GGUF file; use a Hugging Face folder, or set auto")
    experts = None if shape.experts is None else replace(shape.experts, dense_layers=())
    own = replace(shape, num_layers=1, num_extra_layers=0, experts=experts, tie_word_embeddings=False)
    layers = (shape.num_layers,)
    head = Head(MTP, layers, shape.hidden_size, shape.vocab_size, shares_output=shape.tie_word_embeddings)
    if folder is None or not has_weights:
        return DraftModel(None if folder is None else str(folder), own, head=head)
    return DraftModel(str(folder), own, stored_weight_format(folder), stored_weight_group(folder), head=head)


def _check_target(raw: RawConfig, shape: ModelShape, method: str) -> None:
    if shape.gemma is not None:
        raise raw.error(_METHOD, method, f"cannot be used with a {shape.architecture}; set auto or off")


def _check_sizes(fields: TypedFields, shape: ModelShape) -> None:
    """Checks that the head has the sizes of the model, and exactly one layer of the known form."""
    for key in ("hidden_size", "target_hidden_size"):
        if fields.integer(key, shape.hidden_size, 1, MAX_HIDDEN_SIZE) != shape.hidden_size:
            raise fields.fail(key, f"must be {shape.hidden_size} as in the model, whose embedding the head uses")
    if fields.value("vocab_size") != shape.vocab_size:
        raise fields.fail("vocab_size", f"must be {shape.vocab_size} as in the model; the head is for another model")
    if fields.integer("num_hidden_layers", 1, 1, 1 << 10) != 1:
        raise fields.fail("num_hidden_layers", "must be 1; heads with several layers are not supported")
    for key in _UNSUPPORTED_FLAGS:
        if fields.boolean(key, False):
            raise fields.fail(key, "is not supported; only false is")


def _eagle_layers(shape: ModelShape) -> tuple[int, int, int]:
    """Returns the numbers of the three layers after which an EAGLE-3 head reads a hidden state of the model."""
    return 2, shape.num_layers // 2, shape.num_layers - 3


def _check_layers(fields: TypedFields, shape: ModelShape) -> None:
    """Raises an error unless the head reads the hidden states after the usual layers (``_eagle_layers``).

    Some config files list numbers of layers. A number names the last layer before the hidden state or the first layer
    after it, because programs count differently. Both are accepted.
    """
    if shape.num_layers < _LEAST_LAYERS:
        raise fields.fail(
            "num_hidden_layers", f"the model has {shape.num_layers} layers; an EAGLE-3 head needs {_LEAST_LAYERS}"
        )
    key, usual = "eagle_aux_hidden_state_layer_ids", _eagle_layers(shape)
    nested = fields.mapping("eagle_config")
    for place in (fields, nested):
        stated = place.value(key)
        if stated is not None and stated not in (list(usual), [layer - 1 for layer in usual]):
            raise place.fail(key, f"is not supported; only {list(usual)}, the usual layers of such a model")
