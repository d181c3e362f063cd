"""Reads ``adapter_config.json`` of the library PEFT, and refuses settings that the kernels do not support."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import AdapterError
from llm_serving.formats.small_files import read_json_object
from llm_serving.formats.typed_fields import TypedFields
from llm_serving.lora.patterns import NamePatterns, compile_pattern

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1024 * 1024
"""Maximum size of ``adapter_config.json``."""
MAX_PATTERNS = 4096
"""Maximum number of names in a mapping of ``adapter_config.json``, for example in ``rank_pattern``."""
_MAX_RANK = 1 << 16
"""Largest rank that ``adapter_config.json`` may state. ``lora_config.max_rank`` is checked separately."""
ALL_LINEAR = "all-linear"

_REFUSED = {
    "use_dora": "DoRA (use_dora) scales the whole weight",
    "lora_bias": "biases of lora_B (lora_bias) are not supported",
    "modules_to_save": "whole modules in an adapter (modules_to_save) are not supported",
    "trainable_token_indices": "trained rows of the embedding (trainable_token_indices) are not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out) are not supported",
    "layer_replication": "replicated layers (layer_replication) are not supported",
    "use_qalora": "QALoRA (use_qalora) is not supported",
    "target_parameters": "adapters of parameters, such as experts (target_parameters), are not supported",
    "megatron_config": "Megatron's parallel layers (megatron_config) are not supported",
}
"""Unsupported settings of PEFT, each with the reason for the refusal. They change the arithmetic or need further
weights.
"""

_INITIALISATIONS: tuple[object, ...] = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which the training did not change the weights of the base model."""

_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"})
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "lora_dropout"),
        *("layers_to_transform", "loftq_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "task_type", "arrow_config", "lora_ga_config"),
    }
)
"""Settings of PEFT that are ignored, because they do not change the arithmetic of a trained adapter."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter that determine its arithmetic."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    """True for rsLoRA (Kalajdzievski 2023), which divides alpha by the square root of the rank and not by the rank."""
    targets: tuple[str, ...] | str
    """The adapted layers: a tuple with the last parts of their names, a regular expression of whole names, or
    ``ALL_LINEAR``.
    """
    ranks: NamePatterns
    alphas: NamePatterns
    content: bytes
    """The settings as JSON text, for the digest of the adapter."""
    names_all_layers: bool
    """True if every layer that ``targets`` matches must have an adapter. False if other settings exclude some layers.
    """

    def rank_of(self, name: str) -> int:
        """Returns the rank of the adapter of layer ``name``."""
        return int(self.ranks.get(name, self.rank))

    def scale_of(self, name: str) -> float:
        """Returns the factor of the product B A x for layer ``name``: alpha / rank, or alpha / sqrt(rank)."""
        rank = self.rank_of(name)
        return self.alphas.get(name, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def is_target(self, name: str) -> bool:
        """Returns True if ``targets`` matches the layer ``name``."""
        if self.targets == ALL_LINEAR:
            return True
        if isinstance(self.targets, str):
            return compile_pattern(self.targets, "target_modules").fullmatch(name) is not None
        return any(name == target or name.endswith(f".{target}") for target in self.targets)


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads the file in an adapter's folder. Raises AdapterError with the key, its value and the reason."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise AdapterError(f"{folder} has no {CONFIG_FILE}, so it is not the folder of a PEFT adapter.")
    values = read_json_object(file, MAX_CONFIG_BYTES, AdapterError)
    fields = TypedFields(str(file), values, AdapterError)
    _refuse_unsupported(fields, values)
    rank = fields.integer("r", None, 1, _MAX_RANK)
    selects = ("exclude_modules", "layers_to_transform", "layers_pattern")
    return PeftConfig(
        rank=rank,
        alpha=fields.number("lora_alpha", 8.0, -1e6, 1e6),
        is_rank_stabilised=fields.boolean("use_rslora", False),
        targets=_targets(fields),
        ranks=NamePatterns(_numbers(fields, "rank_pattern", whole=True), "rank_pattern"),
        alphas=NamePatterns(_numbers(fields, "alpha_pattern", whole=False), "alpha_pattern"),
        content=json.dumps(values, sort_keys=True).encode(),
        names_all_layers=not any(values.get(key) for key in selects),
    )


def _refuse_unsupported(fields: TypedFields, values: Mapping[str, object]) -> None:
    """Raises AdapterError if a setting needs arithmetic that the kernels do not support, or if the setting is unknown.
    """
    fields.text("peft_type", "LORA", ("LORA",))
    for key, reason in _REFUSED.items():
        if values.get(key):
            raise fields.fail(key, f"{reason}; merge the adapter into the model, or train it without this setting")
    if fields.text("bias", "none") != "none":
        raise fields.fail("bias", "biases in an adapter are not supported; train it with bias: none")
    init = values.get("init_lora_weights")
    if not any(init is each or (isinstance(init, str) and init == each) for each in _INITIALISATIONS):
        raise fields.fail(
            "init_lora_weights",
            "this initialisation (PiSSA, OLoRA, LoftQ, ...) changes the weights of the base model; convert the adapter "
            "to an ordinary one when it is saved (path_initial_model_for_weight_conversion)",
        )
    known = _READ | _HARMLESS | set(_REFUSED)
    for key, value in values.items():
        if key not in known and value:
            raise fields.fail(key, "is a setting that this server does not know, and it may change the arithmetic")


def _targets(fields: TypedFields) -> tuple[str, ...] | str:
    value = fields.value("target_modules")
    if isinstance(value, str):
        if value != ALL_LINEAR:
            compile_pattern(value, "target_modules")
        return value
    names = fields.names("target_modules")
    if not names:
        raise fields.fail("target_modules", f"must be a list of names, a regular expression or {ALL_LINEAR}")
    return names


def _numbers(fields: TypedFields, key: str, *, whole: bool) -> dict[str, float]:
    found = fields.mapping(key)
    names = found.keys()
    if len(names) > MAX_PATTERNS:
        raise fields.fail(key, f"has {len(names)} entries; at most {MAX_PATTERNS} are read")
    if whole:
        return {name: found.integer(name, None, 1, _MAX_RANK) for name in names}
    return {name: found.number(name, None, -1e6, 1e6) for name in names}
