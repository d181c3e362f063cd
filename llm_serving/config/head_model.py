"""Reads draft heads of speculative decoding: EAGLE-3 heads from their own folders, MTP layers from the model's folder.

The formats are those of the published checkpoints. MTP layers have the format of DeepSeek-V3 (arXiv:2412.19437), or
that of Qwen3-Next and Qwen3.5. EAGLE-3 heads (arXiv:2503.01840) have three similar formats: that of the authors, that
of SGLang and SpecForge, and that of the project ``speculators``.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from llm_serving.config.draft_model import EAGLE, MTP, DraftModel, Head
from llm_serving.config.lookup import torch_pickles
from llm_serving.config.source import RawConfig
from llm_serving.errors import CheckpointError
from llm_serving.formats.safetensors_header import tensor_shapes
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.gguf.place import find_gguf
from llm_serving.model.quantization import stored_weight_format, stored_weight_group
from llm_serving.model.shape import MAX_CONFIG_JSON_BYTES, MAX_HIDDEN_SIZE, ModelShape, shape_of_fields

_METHOD, _MODEL = "speculative_config.method", "speculative_config.model"
_ARCHITECTURE = "LlamaForCausalLM"
"""Name of the architecture of an EAGLE-3 head, for models of every family: its layer is a Llama layer. The heads of the
authors of EAGLE-3 state this name.
"""
_NESTED = "transformer_layer_config"
"""Key of ``config.json`` under which ``speculators`` states the sizes of the layer."""
_NUM_LAYERS, _LAYER_IDS = 3, "eagle_aux_hidden_state_layer_ids"
"""An EAGLE-3 head reads the output of three of the model's layers. A key of ``config.json`` may state their numbers."""
_LEAST_LAYERS = 4
"""Minimum number of layers of a model whose EAGLE-3 head states no numbers of layers. With fewer layers, one of the
three numbers that ``_usual_layers`` returns would be below 1, and no layer has this number.
"""
_UNSUPPORTED_OF_LAYER = ("tie_word_embeddings", "bias", "mlp_bias")
_UNSUPPORTED_OF_HEAD = ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MTP_NORM, _MTP_EMBEDDING = "mtp.norm.weight", "mtp.embed_tokens.weight"
"""Names of tensors of Qwen's MTP layers. Every MTP layer has the norm, in every weight format."""
_MTP_WEIGHT = "mtp.layers.0.self_attn.o_proj.weight"
_MTP_SCALE = f"{_MTP_WEIGHT}_scale"
"""A folder has the first tensor without the second one if the linear layers of Qwen's MTP layer are stored as floats.
"""


def read_eagle_head(raw: RawConfig, path: Path, shape: ModelShape, *, has_weights: bool) -> DraftModel:
    """Returns the EAGLE-3 head in the folder ``path`` for a model with the sizes ``shape``.

    ``has_weights`` is False if all weights are random. Raises ConfigError if the head does not fit the model. Raises
    CheckpointError if its files cannot be used.
    """
    if shape.gemma is not None:
        problem = (
            f"cannot be used with a {shape.architecture}: a head needs the model's embedding without the scale that "
            "Gemma's embedding has here; set auto or off"
        )
        raise raw.error(_METHOD, EAGLE, problem)
    if not path.is_dir():
        raise raw.error(_MODEL, str(path), "is not a folder; an EAGLE-3 head has a folder with config.json")
    values = read_json_object(path / "config.json", MAX_CONFIG_JSON_BYTES, CheckpointError)
    whole = TypedFields(str(path / "config.json"), values, CheckpointError)
    is_plain = _has_plain_name(whole)
    sizes = _layer_fields(whole)
    _check_sizes(whole, sizes, shape, is_plain=is_plain)
    layers = _read_layers(whole, shape)
    head_shape = _head_shape(sizes, whole.integer("draft_vocab_size", shape.vocab_size, 1, shape.vocab_size), shape)
    normed = whole.boolean("norm_before_residual", _NESTED in whole)
    if has_weights:
        _check_files(path, is_plain=is_plain)
    head = Head(EAGLE, layers, shape.hidden_size, shape.vocab_size, norm_before_residual=normed)
    return DraftModel(str(path), head_shape, head=head)


def read_mtp_layer(raw: RawConfig, folder: Path | None, shape: ModelShape, *, has_weights: bool) -> DraftModel:
    """Returns the first MTP layer of the model in ``folder``, which has the sizes ``shape``.

    ``has_weights`` is False if all weights are random. Raises ConfigError if the model has no MTP layer that can be
    loaded.
    """
    is_hybrid = shape.delta is not None
    if not is_hybrid and not shape.num_extra_layers:
        problem = "needs MTP layers, and config.json of the model states none (num_nextn_predict_layers); set auto"
        raise raw.error(_METHOD, MTP, problem)
    if folder is not None and find_gguf(folder) is not None:
        raise raw.error(_METHOD, MTP, "cannot be used with a GGUF file; use a Hugging Face folder, or set auto")
    if is_hybrid and has_weights and folder is not None:
        _check_mtp_tensors(raw, folder)
    experts = None if shape.experts is None else replace(shape.experts, dense_layers=())
    own = replace(shape, num_layers=1, num_extra_layers=0, experts=experts, delta=None, tie_word_embeddings=False)
    layers = (shape.num_layers,)
    head = Head(MTP, layers, shape.hidden_size, shape.vocab_size, shares_output=shape.tie_word_embeddings)
    if folder is None or not has_weights or (is_hybrid and _has_float_mtp(folder)):
        return DraftModel(None if folder is None else str(folder), own, head=head)
    return DraftModel(str(folder), own, stored_weight_format(folder), stored_weight_group(folder), head=head)


def _has_float_mtp(folder: Path) -> bool:
    """Returns whether the MTP layer of a Qwen3-Next or Qwen3.5 is stored as floats, also in a quantized folder."""
    return set(tensor_shapes(folder, (_MTP_WEIGHT, _MTP_SCALE))) == {_MTP_WEIGHT}


def _check_mtp_tensors(raw: RawConfig, folder: Path) -> None:
    """Raises ConfigError unless the folder of a Qwen3-Next or Qwen3.5 has an MTP layer that can be loaded.

    Published configs of Qwen3-Next do not state whether there is one, so the names of the tensors decide.
    """
    found = tensor_shapes(folder, (_MTP_NORM, _MTP_EMBEDDING))
    problem = ""
    if _MTP_NORM not in found:
        problem = f"needs an MTP layer, and the model's folder has no tensor {_MTP_NORM}; set auto"
    elif _MTP_EMBEDDING in found:
        problem = f"cannot be used with an MTP layer that has its own embedding ({_MTP_EMBEDDING}); set auto"
    if problem:
        raise raw.error(_METHOD, MTP, problem)


def _has_plain_name(whole: TypedFields) -> bool:
    """Returns True if ``architectures`` names no EAGLE-3 head but a Llama, as the heads of the authors of EAGLE-3 do.

    ``draft_vocab_size`` distinguishes these heads from complete models. Raises an error for all other names.
    """
    names = whole.names("architectures")
    if any("eagle3" in name.lower() for name in names):
        return False
    if _ARCHITECTURE not in names or "draft_vocab_size" not in whole:
        problem = (
            "must name an EAGLE-3 head, for example LlamaForCausalLMEagle3, or must be LlamaForCausalLM with a "
            "draft_vocab_size; a complete model needs speculative_config.method: draft"
        )
        raise whole.fail("architectures", problem)
    return True


def _layer_fields(whole: TypedFields) -> TypedFields:
    """Returns the part of ``config.json`` with the sizes of the head's layer.

    ``speculators`` copies ``tie_word_embeddings`` from the model. But its heads always have their own output layer.
    """
    if _NESTED not in whole:
        return whole
    whole.text("speculators_model_type", "eagle3", ("eagle3",))
    nested = whole.mapping(_NESTED)
    nested.text("model_type", "llama", ("llama",))
    return nested.with_value("tie_word_embeddings", False)


def _check_sizes(whole: TypedFields, sizes: TypedFields, shape: ModelShape, *, is_plain: bool) -> None:
    """Checks that the head has the sizes of the model, and exactly one layer of the known form.

    ``is_plain`` is the result of ``_has_plain_name``. Heads of the authors of EAGLE-3 always have one layer, but their
    ``num_hidden_layers`` may be that of the model.
    """
    for place, key in ((sizes, "hidden_size"), (whole, "target_hidden_size")):
        if place.integer(key, shape.hidden_size, 1, MAX_HIDDEN_SIZE) != shape.hidden_size:
            raise place.fail(key, f"must be {shape.hidden_size} as in the model, whose embedding the head uses")
    if sizes.value("vocab_size") != shape.vocab_size:
        raise sizes.fail("vocab_size", f"must be {shape.vocab_size} as in the model; the head is for another model")
    if sizes.integer("num_hidden_layers", 1, 1, 1 << 10) != 1 and not is_plain:
        raise sizes.fail("num_hidden_layers", "must be 1; heads with several layers are not supported")
    nested = whole.mapping("eagle_config")
    for place, keys in (
        (sizes, _UNSUPPORTED_OF_LAYER),
        (whole, _UNSUPPORTED_OF_HEAD),
        (nested, _UNSUPPORTED_OF_HEAD),
    ):
        for key in keys:
            if place.boolean(key, False):
                raise place.fail(key, "is not supported; only false is")
    if not nested.boolean("use_aux_hidden_state", True):
        raise nested.fail("use_aux_hidden_state", "is not supported; only true is")


def _head_shape(sizes: TypedFields, num_guessed: int, shape: ModelShape) -> ModelShape:
    """Returns the sizes of the head's layer. The head guesses ``num_guessed`` different tokens.

    Published heads state short contexts, because they were trained on short texts. Their rotary embedding also works
    for longer contexts, so the result has the contexts of the model.
    """
    own = {key: sizes.value(key) for key in sizes.keys() if key not in _TOKEN_KEYS}  # noqa: SIM118  (no dict)
    own |= {"architectures": [_ARCHITECTURE], "vocab_size": num_guessed, "num_hidden_layers": 1}
    no_generation = TypedFields(sizes.source, {}, CheckpointError)
    found = shape_of_fields(TypedFields(sizes.source, own, CheckpointError), no_generation)
    return replace(found, max_position_embeddings=shape.max_positions)


def _usual_layers(shape: ModelShape) -> tuple[int, int, int]:
    """Returns the numbers of the three layers whose output an EAGLE-3 head reads by default.

    A layer's number is the number of layers up to it, so the first layer has the number 1.
    """
    return 2, shape.num_layers // 2, shape.num_layers - 3


def _read_layers(whole: TypedFields, shape: ModelShape) -> tuple[int, ...]:
    """Returns the numbers of the layers whose output the head reads, counted as in ``_usual_layers``.

    ``speculators`` and vLLM count in the same way. SGLang and SpecForge state the numbers under ``eagle_config``, and
    their first layer has the number 0. Some converted files have numbers of the other count. So if the numbers are
    those of the usual layers in either count, the usual layers are meant.
    """
    usual, has_usual = _usual_layers(shape), shape.num_layers >= _LEAST_LAYERS
    for place, first in ((whole, 1), (whole.mapping("eagle_config"), 0)):
        stated = place.value(_LAYER_IDS)
        if stated is None:
            continue
        if has_usual and stated in (list(usual), [layer - 1 for layer in usual]):
            return usual
        return _checked_layers(place, shape, first)
    if not has_usual:
        problem = f"must be stated, as the model has {shape.num_layers} layers, fewer than {_LEAST_LAYERS}"
        raise whole.fail(_LAYER_IDS, problem)
    return usual


def _checked_layers(place: TypedFields, shape: ModelShape, first: int) -> tuple[int, ...]:
    """Returns the numbers of layers that ``place`` states. There, the model's first layer has the number ``first``."""
    stated, last = place.value(_LAYER_IDS), first + shape.num_layers - 1
    if not isinstance(stated, list) or len(stated) != _NUM_LAYERS or not all(type(each) is int for each in stated):
        raise place.fail(_LAYER_IDS, f"must be a list of {_NUM_LAYERS} numbers of layers")
    if not all(first <= each <= last for each in stated):
        raise place.fail(_LAYER_IDS, f"every number must be from {first} to {last}, a layer of the model")
    return tuple(each - first + 1 for each in stated)


def _check_files(path: Path, *, is_plain: bool) -> None:
    """Raises CheckpointError if the folder of an EAGLE-3 head has no safetensors.

    With ``is_plain``, also checks that the folder has a tensor which only heads have.
    """
    if any(path.glob("*.safetensors")):
        if is_plain and not tensor_shapes(path, ("fc.weight", "model.fc.weight")):
            problem = "there is no tensor fc.weight, so this is not an EAGLE-3 head"
            raise CheckpointError(f"{path}: {problem}; a complete model needs speculative_config.method: draft")
        return
    pickles = torch_pickles(path)
    if not pickles:
        raise CheckpointError(f"{path}: there are no *.safetensors files with the weights of the head ({_MODEL})")
    if len(pickles) > 1:
        raise CheckpointError(
            f"{path}: PyTorch pickles are not loaded, as they can run code; convert {', '.join(pickles)} to one file "
            "model.safetensors that has the tensors of all of them"
        )
    program = (
        "import torch, safetensors.torch as s; s.save_file({n: t.contiguous().clone() for n, t in "
        f'torch.load({json.dumps(pickles[0])}, weights_only=True, map_location="cpu").items()}}, "model.safetensors")'
    )
    raise CheckpointError(
        f"{path / pickles[0]}: PyTorch pickles are not loaded, as they can run code; convert the file where torch and "
        f"safetensors are installed: cd {shlex.quote(str(path))} && python -c {shlex.quote(program)}"
    )
