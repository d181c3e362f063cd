"""The table of names: which settings of a ``configuration.json`` become which keys, and which have no counterpart.

To add a name, add it to a row, or add a row. ``docs/chat_configuration.md`` is generated from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.chat_import.conversions import (
    DEVICE,
    DTYPE,
    FIRST_DEVICE,
    LEVEL,
    LIST,
    MICROSECONDS,
    MODEL_PATH,
    NUM_DEVICES,
    PORT,
    TASK,
    UNCHANGED,
    WEIGHT_FORMAT,
    Conversion,
    true_means,
)

DEVICES = "number of devices"
"""Stands for a key. The number of all devices is ``tensor_parallel`` x ``pipeline_parallel`` x ``data_parallel``."""
TENSOR_PARALLEL = "parallel_config.tensor_parallel"

DO_SAMPLE = "do_sample"
"""Name of the setting whose value false turns sampling off."""
TOP = ("",)
"""The top level of the file, as the names of objects that a short name may be in."""
SERVER = ("", "server", "server_config", "serving", "serving_config", "service", "http")
LOG = ("log", "log_config", "logging", "logger")
MODEL = ("", "model", "model_config", "model_deploy_config")
WEB_DEMO = ("web_demo", "web", "demo", "gradio")


@dataclass(frozen=True, slots=True)
class Target:
    """A key that gets the value of a setting, and the conversion of the value."""

    key: str
    conversion: Conversion = UNCHANGED


@dataclass(frozen=True, slots=True)
class Row:
    """Names with the same meaning. The loader ignores case, ``_`` and ``-`` of a name."""

    names: tuple[str, ...] = ()
    """Names that have this meaning in any object of the file."""
    short_names: tuple[str, ...] = ()
    """Names that have this meaning only in one of the objects ``places``, because they have others elsewhere."""
    places: tuple[str, ...] = ()
    """Names of objects. The empty name is the top level of the file."""


@dataclass(frozen=True, slots=True)
class Imported(Row):
    """Names whose value is imported. Most have one target."""

    targets: tuple[Target, ...] = ()


@dataclass(frozen=True, slots=True)
class Absent(Row):
    """Names that have no counterpart here."""

    reason: str = ""
    harmless: tuple[object, ...] | None = ()
    """Values that only lead to a note, because the server behaves in this way. None: all values. The others need
    ``--ignore``."""
    samples: bool = False
    """True if the value has no effect without sampling. With ``do_sample`` false in the same object, it is harmless."""


def _to(
    key: str,
    *names: str,
    conversion: Conversion = UNCHANGED,
    short: tuple[str, ...] = (),
    places: tuple[str, ...] = (),
) -> Imported:
    return Imported(names, short, places, (Target(key, conversion),))


IMPORTED: tuple[Imported, ...] = (
    _to(
        "serving_config.server_ip", "server_ip", "server_host", "server_address", "listen_ip", "bind_address",
        short=("host", "ip", "ip_address"), places=SERVER,
    ),
    _to(
        "serving_config.server_port", "server_port", "http_port", "listen_port", "api_port",
        conversion=PORT, short=("port",), places=SERVER,
    ),
    _to("serving_config.admin_ip", "admin_ip", "management_ip", "management_ip_address"),
    _to("serving_config.admin_port", "admin_port", "management_port", conversion=PORT),
    _to("serving_config.tls_cert", "tls_cert", "ssl_cert", "ssl_certfile"),
    _to("serving_config.tls_key", "tls_key", "tls_pk", "ssl_key", "ssl_keyfile"),
    _to("serving_config.cors_origins", "cors_origins", "allow_origins", "allowed_origins", conversion=LIST),
    _to("serving_config.max_connections", "max_connections", "max_link_num"),
    _to(
        "serving_config.agent_start_timeout_s", "agent_start_timeout", "start_timeout", "startup_timeout",
        "model_load_timeout",
    ),
    _to("serving_config.step_timeout_s", "step_timeout"),
    _to(
        "serving_config.drain_timeout_s", "drain_timeout", "shutdown_timeout", "graceful_timeout",
        "graceful_shutdown_timeout", "timeout_graceful_shutdown",
    ),
    _to(
        "model_config.model_path", "model_path", "model_dir", "model_folder", "model_name_or_path", "model_weight_path",
        "pretrained_model_name_or_path", "pretrained_model_dir", "checkpoint_path", "checkpoint_dir",
        "checkpoint_name_or_path", "load_checkpoint", "ckpt_path", "weight_path", "weights_path",
        conversion=MODEL_PATH, short=("model",), places=TOP,
    ),
    _to(
        "model_config.model_cfg_path", "model_cfg_path", "model_config_path", "model_yaml", "yaml_file", "yaml_path",
        short=("config",), places=("model",),
    ),
    _to(
        "model_config.model_name", "model_name", "served_model_name",
        short=("name",), places=("model", "model_config"),
    ),
    _to("model_config.task", conversion=TASK, short=("task",), places=MODEL),
    _to(
        "model_config.model_dtype", "model_dtype", "compute_dtype", "torch_dtype", "data_type",
        conversion=DTYPE, short=("dtype", "precision"), places=MODEL,
    ),
    _to("model_config.weight_format", "quantization", "quantize", "quant_type", conversion=WEIGHT_FORMAT),
    _to(
        "model_config.device_target", "device_target", "device_type",
        conversion=DEVICE, short=("device",), places=MODEL,
    ),
    _to(
        "model_config.max_generate_length", "max_generate_length", "max_length", "max_decode_length", "seq_length",
        "seq_len", "max_seq_length", "max_seq_len", "max_sequence_length", "max_model_len", "max_context_length",
        "max_context_len", "context_length",
    ),
    _to(
        "model_config.seq_length", "max_input_length", "max_input_len", "max_input_tokens", "max_input_token_len",
        "max_prompt_length", "max_prompt_len", "max_source_length",
        conversion=LIST,
    ),
    _to("model_config.prefill_batch_size", "prefill_batch_size", "max_prefill_batch_size", conversion=LIST),
    _to(
        "model_config.decode_batch_size", "batch_size", "max_batch_size", "decode_batch_size", "max_decode_batch_size",
        "max_num_seqs",
        conversion=LIST,
    ),
    _to("model_config.batching_strategy", "batching_strategy", "batching_mode"),
    _to(
        "model_config.batching_strategy", "continuous_batching", "enable_continuous_batching",
        conversion=true_means("continuous"),
    ),
    _to(
        "model_config.batching_strategy", "dynamic_batching", "enable_dynamic_batching",
        conversion=true_means("dynamic"),
    ),
    _to("model_config.batch_waiting_time", "batch_waiting_time", "prefill_batch_waiting_time"),
    _to("model_config.batch_waiting_time", "max_queue_delay_microseconds", conversion=MICROSECONDS),
    _to("model_config.decode_batch_waiting_time", "decode_batch_waiting_time"),
    _to(
        "model_config.page_attention", "page_attention", "paged_attention", "use_page_attention", "use_paged_attention",
        "enable_page_attention", "enable_paged_attention",
    ),
    _to("model_config.end_token", "end_token", "end_token_id", "eos_token_id", "eos_id"),
    _to("model_config.pad_token_id", "pad_token_id", "pad_id"),
    _to("model_config.vocab_size", "vocab_size"),
    _to("pa_config.block_size", "block_size", "cache_block_size", "kv_block_size"),
    _to("pa_config.num_blocks", "num_blocks", "num_kv_blocks", "num_cache_blocks"),
    _to(
        "tokenizer.vocab_file", "vocab_file", "vocab_path", "tokenizer_path", "tokenizer_file", "tokenizer_dir",
        "tokenizer_name_or_path",
        short=("tokenizer",), places=("", "model"),
    ),
    _to("tokenizer.type", "tokenizer_type", "tokenizer_class"),
    _to(
        TENSOR_PARALLEL, "tensor_parallel", "tensor_parallel_size", "model_parallel", "model_parallel_size", "tp",
        "tp_size", "mp", "mp_size",
    ),
    _to("parallel_config.data_parallel", "data_parallel", "data_parallel_size", "dp", "dp_size"),
    _to(
        "parallel_config.pipeline_parallel", "pipeline_parallel", "pipeline_parallel_size", "pipeline_stage",
        "pipeline_stages", "pp", "pp_size",
    ),
    _to(DEVICES, "device_num", "num_devices", "device_count", "world_size", "rank_size", "npu_num", "num_npus"),
    _to("serving_config.start_device_id", "device_id", "start_device_id", "npu_id"),
    Imported(
        ("device_ids", "npu_device_ids"),
        targets=(Target("serving_config.start_device_id", FIRST_DEVICE), Target(DEVICES, NUM_DEVICES)),
    ),
    _to("scheduler_config.max_num_batched_tokens", "max_num_batched_tokens", "max_prefill_tokens"),
    _to(
        "scheduler_config.max_waiting_requests", "max_waiting_requests", "queue_size", "max_queue_size",
        "max_queue_length", "max_queue_len",
    ),
    _to("scheduler_config.prefix_cache", "prefix_cache", "enable_prefix_cache", "enable_prefix_caching"),
    _to("log_config.level", "log_level", "uvicorn_level", conversion=LEVEL, short=("level",), places=LOG),
    _to("log_config.path", "log_path", "log_file", "log_file_path", short=("path", "file"), places=LOG),
    _to("log_config.max_mib", "log_file_size"),
    _to("log_config.keep_files", "log_file_num"),
)  # fmt: skip
"""Names that are imported."""

_SAMPLING = (
    "each request to /chat states it in gen_kwargs, and is greedy otherwise; serving_config.generation_config has "
    "defaults for OpenAI's endpoints"
)
_OUTPUT = "each request states max_new_tokens in gen_kwargs; without it, the output may fill the context"
_TIMEOUT = "requests have no time limit; a request may state deadline_ms, the time in which it must start"
_SIZES = "config.json of the model folder states it"
_KEYS_IN_FILE = "a config has no secrets; put API keys into a file, and set serving_config.api_keys_file"
_ALWAYS = "the server always works in this way"
_TYPES = "the operators choose the types of intermediate values"
_ONE_ANSWER = "/chat returns one answer, which is sampled or greedy"

ABSENT: tuple[Absent, ...] = (
    Absent((DO_SAMPLE,), reason=_SAMPLING, harmless=(False,)),
    Absent(("temperature",), reason=_SAMPLING, harmless=(0,), samples=True),
    Absent(("top_k",), reason=_SAMPLING, harmless=(1,), samples=True),
    Absent(("top_p", "min_p"), reason=_SAMPLING, samples=True),
    Absent(("repetition_penalty",), reason=_SAMPLING, harmless=(1,)),
    Absent(("frequency_penalty", "presence_penalty"), reason=_SAMPLING, harmless=(0,)),
    Absent(("seed", "random_seed"), reason="each request states its seed in gen_kwargs", samples=True),
    Absent(("num_beams", "num_return_sequences"), reason=_ONE_ANSWER, harmless=(1,)),
    Absent(("stop", "stop_words", "stop_strings"), reason="each request states stop in gen_kwargs"),
    Absent(
        ("max_new_tokens", "max_output_length", "max_output_len", "max_output_tokens", "max_iter_times"), reason=_OUTPUT
    ),
    Absent(("system_prompt", "prompt_template"), reason="each request has its messages; the client adds these texts"),
    Absent(("chat_template",), reason="the model folder has the chat template"),
    Absent(
        ("request_timeout", "infer_timeout", "e2e_timeout", "token_timeout"),
        ("timeout",),
        SERVER,
        reason=_TIMEOUT,
    ),
    Absent(
        ("api_key", "api_keys", "secret_key", "tls_pk_pwd", "ssl_keyfile_password"),
        ("password",),
        SERVER,
        _KEYS_IN_FILE,
    ),
    Absent(("https_enabled",), reason="serving_config.tls_cert and tls_key turn TLS on; without them it is off"),
    Absent(("workers", "num_workers", "uvicorn_workers"), reason="one process serves HTTP", harmless=(1,)),
    Absent(("device_range",), reason="device_id and device_num state the devices"),
    Absent(("model_instance_number",), reason="parallel_config.data_parallel is the number of copies", harmless=(1,)),
    Absent(("npu_mem_size", "cpu_mem_size"), reason="pa_config.num_blocks states the size", harmless=(-1,)),
    Absent(("metrics_port",), reason="/metrics is on the port of the server, or on serving_config.admin_port"),
    Absent(("auto_trans_ckpt",), reason="the loader divides the weights among the agents", harmless=(False,)),
    Absent(("run_mode",), reason="this server only generates", harmless=("predict",)),
    Absent(("use_past",), reason="keys and values are always cached", harmless=(True,)),
    Absent(("is_dynamic",), reason="the lengths of the graphs are always dynamic", harmless=(True,)),
    Absent(("debug", "reload"), reason="there is no mode for development", harmless=(False,)),
    Absent(("use_flash_attention", "use_kvcache_op"), reason=_ALWAYS, harmless=None),
    Absent(("use_parallel",), reason="the number of devices states it", harmless=None),
    Absent(("rank_table_file", "hccl_connect_time"), reason="the agents find each other", harmless=None),
    Absent(("stream",), reason="/chat and /stream_chat_post are both served", harmless=None),
    Absent(("access_log",), reason="the event log has an event for each request", harmless=None),
    Absent(
        ("param_init_type", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype", "embedding_init_type"),
        reason=_TYPES,
        harmless=None,
    ),
    Absent(
        ("hidden_size", "intermediate_size", "num_layers", "num_hidden_layers", "num_heads", "num_attention_heads",
         "n_kv_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embedding", "max_position_embeddings",
         "bos_token_id", "model_type", "architectures"),
        ("type",),
        ("model", "model_config", "arch"),
        _SIZES,
        None,
    ),
    Absent(("trust_remote_code",), reason="code of a model folder is never run", harmless=None),
    Absent(
        ("allow_remote",),
        reason="ModelScope's flag for a model on its site; it does not mean serving_config.allow_remote",
        harmless=None,
    ),
    Absent((), ("host", "port"), WEB_DEMO, "the chat page is at / of the server", None),
    Absent((), ("type",), ("pipeline",), "the model folder decides how prompts are processed", None),
    Absent(("framework", "backend_type", "backend_name"), reason="MindSpore computes the model", harmless=None),
    Absent(
        ("mindspore_version", "mindformers_version", "transformers_version"),
        ("version", "description", "author", "license"),
        TOP,
        "it describes the file",
        None,
    ),
)  # fmt: skip
"""Names without a counterpart, with the reason."""
