"""Finds the settings of a MindFormers YAML that have no effect here, and states the reason for each.

The type of each listed setting is checked. To add a setting, add it to one of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm_serving.config.source import UnusedSetting
from llm_serving.formats.typed_fields import TypedFields, short_repr

_UNKNOWN = "not a setting of this server"
_TRAINING = "it is for training and evaluation; this server only generates"
_PARALLEL = "parallel_config of the deployment file divides the model"
_WEIGHTS = "model_config.model_path of the deployment file names the weights"
_REQUEST = "each request states its sampling"
_CACHE = "pa_config of the deployment file sizes the KV cache"
_TYPES = "the operators choose the types of intermediate values"
_TOKENIZER = "tokenizer of the deployment file, or the model folder, gives the tokenizer"


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "a mapping", list: "a list"}


@dataclass(frozen=True, slots=True)
class _Unused:
    """One setting of a MindFormers YAML that has no effect.

    ``kinds`` are the accepted types, and ``reason`` states why the setting has no effect. ``neutral`` is the value of
    the setting that describes what this server does in any case. A setting with this value is not reported.
    """

    kinds: tuple[type, ...]
    reason: str
    neutral: object = None


_FILE: Mapping[str, _Unused] = {
    "seed": _Unused((int,), "each request states its seed", 0),
    "output_dir": _Unused((str,), "log_config.path of the deployment file names the folder of the log"),
    "run_mode": _Unused((str,), "this server only generates", "predict"),
    "use_legacy": _Unused((bool,), "model_config.model_type of the deployment file chooses the classes of the model"),
    "load_checkpoint": _Unused((str,), _WEIGHTS, ""),
    "load_ckpt_format": _Unused((str,), _WEIGHTS, "safetensors"),
    "auto_trans_ckpt": _Unused((bool,), "the loader divides the weights among the agents", False),
    "src_strategy_path_or_dir": _Unused((str,), _WEIGHTS, ""),
    "use_parallel": _Unused((bool,), _PARALLEL, False),
    "parallel": _Unused((dict,), _PARALLEL),
    "parallel_config": _Unused((dict,), _PARALLEL),
    "micro_batch_interleave_num": _Unused((int,), _TRAINING, 1),
    "moe_config": _Unused((dict,), "the model folder has the sizes of the experts"),
    "trainer": _Unused((dict,), _TRAINING),
    "runner_config": _Unused((dict,), _TRAINING),
    "runner_wrapper": _Unused((dict,), _TRAINING),
    "recompute_config": _Unused((dict, bool), _TRAINING),
    "optimizer": _Unused((dict,), _TRAINING),
    "lr_schedule": _Unused((dict,), _TRAINING),
    "train_dataset": _Unused((dict,), _TRAINING),
    "train_dataset_task": _Unused((dict,), _TRAINING),
    "eval_dataset": _Unused((dict,), _TRAINING),
    "eval_dataset_task": _Unused((dict,), _TRAINING),
    "metric": _Unused((dict, list), _TRAINING),
    "callbacks": _Unused((list,), _TRAINING),
    "eval_callbacks": _Unused((list,), _TRAINING),
    "do_eval": _Unused((bool,), _TRAINING, False),
    "resume_training": _Unused((bool, str), _TRAINING, False),
    "only_save_strategy": _Unused((bool,), _TRAINING, False),
    "processor": _Unused((dict,), _TOKENIZER),
    "profile": _Unused((bool,), "POST /profile/start profiles while the server runs", False),
}
_CONTEXT: Mapping[str, _Unused] = {
    "ascend_config": _Unused((dict,), "the operators keep the types of the graph"),
    "mode": _Unused((int,), "the graphs are always compiled", 0),
    "affinity_cpu_list": _Unused((list, dict, str), "model_config.cpu_cores of the deployment file chooses the cores"),
    "mempool_block_size": _Unused((str,), "MindSpore's pool grows as needed, up to max_device_memory"),
    "memory_optimize_level": _Unused((str,), "buffers are planned at the start, see the memory plan"),
    "infer_precision_sync": _Unused((bool,), "the order of all sums is fixed"),
    "use_flash_attention": _Unused((bool,), "attention always uses flash kernels; results are the same", True),
}
_MODEL: Mapping[str, _Unused] = {
    "batch_size": _Unused((int,), "model_config.decode_batch_size of the deployment file sizes the batch"),
    "block_size": _Unused((int,), _CACHE),
    "num_blocks": _Unused((int,), _CACHE),
    "max_decode_length": _Unused((int,), "model_config.max_generate_length of the deployment file is the limit"),
    "max_length": _Unused((int,), "model_config.max_generate_length of the deployment file is the limit"),
    "do_sample": _Unused((bool,), _REQUEST),
    "top_k": _Unused((int,), _REQUEST),
    "top_p": _Unused((int, float), _REQUEST),
    "temperature": _Unused((int, float), _REQUEST),
    "repetition_penalty": _Unused((int, float), _REQUEST),
    "use_past": _Unused((bool,), "keys and values are always cached", True),
    "is_dynamic": _Unused((bool,), "the lengths of the graphs are always dynamic", True),
    "qkv_concat": _Unused((bool,), "the loader joins and divides weights as the operators need them", False),
    "ffn_concat": _Unused((bool,), "the loader joins and divides weights as the operators need them", False),
    "use_flash_attention": _CONTEXT["use_flash_attention"],
    "layernorm_compute_type": _Unused((str,), _TYPES),
    "layernorm_compute_dtype": _Unused((str,), _TYPES),
    "softmax_compute_type": _Unused((str,), _TYPES),
    "softmax_compute_dtype": _Unused((str,), _TYPES),
    "rotary_dtype": _Unused((str,), _TYPES),
    "checkpoint_name_or_path": _Unused((str,), _WEIGHTS, ""),
    "ignore_token_id": _Unused((int,), _TRAINING),
    "offset": _Unused((int, list), _PARALLEL, 0),
    "auto_map": _Unused((dict,), "code of a model folder is never run"),
}


def find_unused(document: TypedFields, read: Mapping[str, str]) -> tuple[UnusedSetting, ...]:
    """Returns the settings of a MindFormers YAML that have no effect.

    ``read`` has the full names of the settings with an effect. If a known setting has a wrong type, raises the error
    class of ``document`` with file, key and value.
    """
    sizes = document.mapping("model").mapping("model_config")
    is_config_json = "num_hidden_layers" in sizes or "num_attention_heads" in sizes
    return (
        *_of_section(document, "", _FILE, read, _UNKNOWN),
        *_of_section(document.mapping("context"), "context.", _CONTEXT, read, _UNKNOWN),
        *_of_section(sizes, "model.model_config.", _MODEL, read, "" if is_config_json else _UNKNOWN),
    )


def _of_section(
    fields: TypedFields, prefix: str, known: Mapping[str, _Unused], read: Mapping[str, str], unknown: str
) -> list[UnusedSetting]:
    """Returns the settings without effect in one section, whose full names begin with ``prefix``.

    ``known`` is the section's table of settings without effect. ``read`` names the settings with an effect. ``unknown``
    is the reason to report for settings that are neither in ``known`` nor in ``read``. If ``unknown`` is empty, these
    settings are not reported.
    """
    found = []
    for key in fields.keys():  # noqa: SIM118  (not a dict)
        value, entry = fields.value(key), known.get(key)
        if entry is not None and value is not None and type(value) not in entry.kinds:
            raise fields.fail(key, f"must be {' or '.join(_KINDS[kind] for kind in entry.kinds)}")
        reason = entry.reason if entry is not None else unknown
        is_read = f"{prefix}{key}" in read or any(name.startswith(f"{prefix}{key}.") for name in read)
        neutral = None if entry is None else entry.neutral
        if reason and value is not None and (entry is not None or not is_read) and value != neutral:
            shown = "{...}" if isinstance(value, dict) else short_repr(value)
            found.append(UnusedSetting(fields.source, f"{prefix}{key}", shown, reason))
    return found
