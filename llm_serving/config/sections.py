"""All sections and keys of the configuration. Attributes have the names of the YAML. To add a key, add a field.

In a loaded ``Config``, paths are absolute, and ``auto`` and null are replaced by values of the model or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.batch_section import BatchConfig
from llm_serving.config.events_section import KvEventsConfig
from llm_serving.config.image_section import ImageConfig
from llm_serving.config.kv_tier_section import KvTierConfig
from llm_serving.config.model_section import MAX_SEQS, MAX_TOKENS, ModelConfig
from llm_serving.config.models_section import ModelsConfig
from llm_serving.config.parallel_section import ParallelConfig
from llm_serving.config.schema import own, published, without_effect
from llm_serving.config.shadow_section import ShadowConfig
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

MAX_BLOCKS = 64 * 1024 * 1024
MAX_SECONDS = 86_400.0
DEFAULT_ROW_CHECK_INTERVAL = 500
DEFAULT_SERVER_PORT = 8835
"""Default of ``serving_config.server_port``. A test compares it with the port in the documentation."""


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Addresses of the server and its agents, limits and timeouts."""

    agent_ports: tuple[int, ...] = published(
        (16002,),
        "Port of each agent, in order of rank. 0 takes any free port, and `[0]` alone takes free ports for all agents.",
        low=0,
        high=65535,
    )
    agent_ip: str = published("127.0.0.1", "Address of the agents. It must be a loopback address.")
    start_device_id: int = published(
        0, "Number of the first agent's device. Further agents have the next devices.", low=0, high=255
    )
    server_ip: str = published(
        "127.0.0.1", "Address of the HTTP server. Other addresses than loopback need `allow_remote: true`."
    )
    server_port: int = published(
        DEFAULT_SERVER_PORT, "Port of the HTTP server; 0 takes any free port.", low=0, high=65535
    )
    prefill_batch_waiting_time: float | None = without_effect(
        "Maximum waiting time of a prefill step.", "model_config.batch_waiting_time has this meaning"
    )
    decode_batch_waiting_time: float | None = without_effect(
        "Maximum waiting time of a decode step.", "model_config.decode_batch_waiting_time has this meaning"
    )
    enable_host_post_sampling: bool = without_effect(
        "Sample on the host instead of the device.", "the device decides where tokens are sampled", default=False
    )
    allow_remote: bool = own(
        False,
        "Allow addresses that other machines can reach. The server then needs TLS (`tls_cert`) and API keys "
        "(`api_keys_file`) or client certificates (`tls_client_ca`).",
    )
    allow_remote_unprotected: bool = own(
        False,
        "Allow `allow_remote` without TLS or without API keys. Everyone who reaches the server can then read the "
        "traffic or send requests. Use it only behind a proxy or a firewall that protects the server.",
    )
    api_keys_file: str | None = own(
        None,
        "File with the API keys, one on each line; `docs/security.md` has its form. Then every route but "
        "`/health/live` needs `Authorization: Bearer KEY`. The file is read again when it changes. The environment "
        "variable `LLM_SERVING_API_KEYS` may hold these lines, too.",
        null="every client may send requests, unless the environment variable has keys",
    )
    tls_cert: str | None = own(
        None,
        "File with the server's certificate and its chain (PEM). Then clients connect with `https://`. New connections "
        "use a changed file without a restart.",
        null="no encryption",
    )
    tls_key: str | None = own(None, "File with the private key of `tls_cert` (PEM, no password).", null="no encryption")
    tls_client_ca: str | None = own(
        None,
        "File with certificates of authorities (PEM). Then only clients with a certificate of one of them can connect "
        "(mTLS).",
        null="clients need no certificate",
    )
    unix_socket: str | None = own(
        None, "Path of a UNIX socket on which the server listens, too, without TLS.", null="no UNIX socket"
    )
    unix_socket_users: str = own(
        "owner",
        "Users that may connect to the UNIX socket. `owner`: the server's user (mode 0600). `group`: its group, too "
        "(0660). `all`: every user of the machine (0666).",
        choices=("owner", "group", "all"),
    )
    admin_port: int | None = own(
        None,
        "Port of a listener of its own for `/metrics`, `/server_info`, `/requests`, `/profile` and the page "
        "`/operator`; 0 takes any free port. The other listeners then do not have these routes.",
        low=0,
        high=65535,
        null="all routes are on `server_port`",
    )
    admin_ip: str = own(
        "127.0.0.1", "Address of `admin_port`. Other addresses than loopback need `allow_remote: true`."
    )
    audit_log: str | None = own(
        None,
        "File of the audit log, with one line for each request: key, route, status, tokens and time, but never a "
        "prompt.",
        null="no audit log",
    )
    allowed_hosts: tuple[str, ...] | None = own(
        None,
        "Names that the `Host` of a request may have. Addresses, `localhost` and, with `allow_remote`, the machine's "
        "own name are always allowed. `*` allows every name, so foreign web pages can reach the server through a "
        "browser.",
        null="no other names",
    )
    cors_origins: tuple[str, ...] | None = own(
        None,
        "Origins of web pages that may send requests and read the responses, for example `https://chat.example`. `*` "
        "allows all web pages.",
        null="no page of another origin",
    )
    generation_config: str = own(
        "model",
        "Sampling parameters of requests to OpenAI's endpoints that set none. `model`: those in the model's "
        "`generation_config.json` (`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`). `none`: those of "
        "OpenAI's API, as temperature 1.",
        choices=("model", "none"),
    )
    trusted_proxies: tuple[str, ...] | None = own(
        ("127.0.0.1", "::1"),
        "Addresses or networks of reverse proxies, for example `10.1.0.0/16`. Only their header `X-Request-Start` "
        "counts.",
        null="no proxy is trusted",
    )
    max_body_bytes: int = own(
        8 * 1024 * 1024, "Maximum size of an HTTP request body.", unit="bytes", low=1024, high=1024 * 1024 * 1024
    )
    max_body_bytes_in_flight: int = own(
        64 * 1024 * 1024,
        "Maximum size of all HTTP request bodies together that are being read. At least `max_body_bytes`.",
        unit="bytes",
        low=1024,
        high=1 << 40,
    )
    max_connections: int = own(
        4096,
        "Maximum number of HTTP connections. The limit of open files (`ulimit -n`) may allow fewer.",
        low=1,
        high=1 << 20,
    )
    max_request_tokens: int | None = own(
        None,
        "Maximum number of tokens of one HTTP request in the worst case: prompts x n x (prompt tokens + maximum number "
        "of output tokens).",
        unit="tokens",
        low=1,
        high=1 << 40,
        null="64 times the maximum length of a sequence",
    )
    agent_restart_limit: int | None = own(
        None,
        "Restarts of a failing agent in a row before the server stops with exit code 1. The pauses between them grow "
        "to 60 s.",
        low=0,
        high=1000,
        null="no limit",
    )
    agent_start_timeout_s: float = own(
        600.0, "Maximum time for an agent to load, compile and warm up.", unit="seconds", low=1.0, high=MAX_SECONDS
    )
    confine_agents: str = own(
        "auto",
        "Confine agents with Landlock and seccomp: an agent reads its model and its code, writes its cache and "
        "profiles, and opens no connection. `auto`: on a CPU, if the kernel can, but not with MindFormers. `on`: "
        "always; without Landlock the start fails. `off`: never.",
        choices=("auto", "on", "off"),
    )
    step_timeout_s: float = own(
        300.0,
        "Maximum time of a step. After it the agent counts as failed.",
        unit="seconds",
        low=1.0,
        high=MAX_SECONDS,
    )
    drain_timeout_s: float = own(
        30.0,
        "Time that running requests have to complete after SIGTERM or SIGINT. Then they end with an error.",
        unit="seconds",
        low=0.0,
        high=MAX_SECONDS,
    )
    structured_outputs: bool = own(
        True,
        "Accept `response_format` and `structured_outputs`. The masks of allowed tokens take shared memory: 8 step "
        "slots x the largest batch x the vocabulary / 8 bytes.",
    )
    tool_format: str = own(
        "auto",
        "How the model writes tool calls. `auto`: the chat template shows it. `none`: requests with tools are refused.",
        choices=("auto", "none", *TOOL_FORMATS),
    )
    reasoning_format: str = own(
        "auto",
        "How the model writes its reasoning. `auto`: the chat template shows it. `none`: reasoning is content.",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    canary_interval_s: float = own(
        300.0,
        "Time between two runs of a fixed prompt, whose tokens must stay the same. 0 turns the check off.",
        unit="seconds",
        low=0.0,
        high=MAX_SECONDS,
    )
    row_check_interval: int | None = own(
        None,
        "One decode step in this number of steps has a sequence that is computed again, alone. Its logits must have "
        "the same bits, otherwise the agents are restarted. 0 turns the check off.",
        unit="steps",
        low=0,
        high=1_000_000_000,
        null="500 on a CPU. 0 on an Ascend, which does not promise equal bits",
    )


@dataclass(frozen=True, slots=True)
class PagedAttentionConfig:
    """The KV cache."""

    num_blocks: int = published(
        1024,
        "Blocks of the KV cache. The first one pads block tables. `auto`: as many as fit the free memory after the "
        "weights, at most those that all running sequences can use, if there is no prefix cache.",
        unit="blocks",
        low=2,
        high=MAX_BLOCKS,
        auto=True,
    )
    block_size: int = published(
        16,
        "Tokens in a block. `auto`: 16 on a CPU, and on an Ascend the largest size of its kernels, up to 128.",
        unit="tokens",
        low=1,
        high=1024,
        auto=True,
    )
    decode_seq_length: int = published(
        4096,
        "Maximum length of a sequence in the cache, prompt and output together. `auto`: as long as the model and the "
        "memory permit; with a number of blocks, also as long as the blocks.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        auto=True,
    )
    num_host_blocks: int | None = own(
        None,
        "Blocks of host memory for swapped sequences. 0 turns swapping off.",
        unit="blocks",
        low=0,
        high=MAX_BLOCKS,
        null="equal to `num_blocks` if `scheduler_config.preemption` is `swap` or `auto`, else 0",
    )


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer."""

    type: str = published(
        "auto",
        "Kind of tokenizer. `LlamaTokenizer` reads a SentencePiece `tokenizer.model`. `LlamaTokenizerFast` "
        "reads `tokenizer.json` or, without it, byte-level BPE in `vocab.json` and `merges.txt`. `auto` takes "
        "the first of `tokenizer.json`, `tokenizer.model` and `vocab.json` that exists.",
        choices=("auto", "LlamaTokenizer", "LlamaTokenizerFast"),
    )
    vocab_file: str | None = published(
        None,
        "Tokenizer file, or the folder that holds it. It is searched like `model_cfg_path`.",
        null="the model folder",
    )


@dataclass(frozen=True, slots=True)
class BasicInputsConfig:
    """Inputs of every step."""

    type: str = published("LlamaBasicInputs", "Kind of inputs, without effect.", choices=("LlamaBasicInputs",))


@dataclass(frozen=True, slots=True)
class ExtraInputsConfig:
    """Additional inputs of a step for some graphs."""

    type: str = published("LlamaExtraInputs", "Kind of inputs, without effect.", choices=("LlamaExtraInputs",))


@dataclass(frozen=True, slots=True)
class WarmupInputsConfig:
    """Inputs of the warm-up."""

    type: str = published(
        "LlamaWarmupInputs",
        "Kind of inputs, without effect: the warm-up runs the largest configured steps.",
        choices=("LlamaWarmupInputs",),
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The choice of requests for each step, and limits on waiting requests. `docs/scheduling.md` compares policies."""

    policy: str = own(
        "prefill_first",
        "Which step comes next. `prefill_first`: prompts before running requests. `fcfs`: prefill and decode "
        "steps alternate. `decode_first`: running requests before prompts. `chunked`: all decodes and chunks "
        "of prompts in one step, up to `chunk_tokens`. `slo`: as `chunked`, with as many prompt tokens as the "
        "objectives permit.",
        choices=("prefill_first", "fcfs", "decode_first", "chunked", "slo"),
    )
    max_num_seqs: int | None = own(
        None,
        "Maximum number of sequences that have blocks at the same time.",
        unit="sequences",
        low=1,
        high=MAX_SEQS,
        null="the largest of `model_config.decode_batch_size`",
    )
    max_num_batched_tokens: int | None = own(
        None,
        "Maximum number of tokens in a step. A longer prompt is prefilled in several steps.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        null="the largest of `model_config.seq_length`, limited to what a prefill step can hold",
    )
    decode_steps_ahead: int = own(
        1, "Decode steps that are sent before the result of the current one has arrived.", unit="steps", low=0, high=3
    )
    max_waiting_requests: int = own(
        1024, "Maximum number of waiting requests. Others get a 429.", unit="requests", low=1, high=1_000_000
    )
    max_waiting_tokens: int | None = own(
        None,
        "Maximum number of waiting prompt tokens. Other requests get a 429.",
        unit="tokens",
        low=1,
        high=2**40,
        null="no limit",
    )
    cache_salt: str = own(
        "auto",
        "Which requests share the prefix cache. `none`: all. `tenant`: only those with the same API key, so "
        "that response times reveal nothing about the prompts of others. `auto`: as `tenant` if the server has API "
        "keys, otherwise as `none`.",
        choices=("auto", "none", "tenant"),
    )
    chunk_tokens: int | None = own(
        None,
        "Tokens in a step of policy `chunked`: one for each decoding sequence, the rest (at least 16) for "
        "prompts. Policy `slo` uses it until it has learned step times.",
        unit="tokens",
        low=1,
        high=MAX_TOKENS,
        null="the larger of 256 and twice the largest of `model_config.decode_batch_size`; at most "
        "`max_num_batched_tokens`",
    )
    preemption: str = own(
        "recompute",
        "Treatment of a running sequence whose blocks an older one needs. `recompute`: its tokens are "
        "computed again later. `swap`: its blocks move to host memory (`pa_config.num_host_blocks`); if that "
        "is full, it is recomputed. `auto`: the faster way by measured rates. Models with linear attention always "
        "recompute.",
        choices=("recompute", "swap", "auto"),
    )
    prefix_cache: bool | None = own(
        None,
        "Share the blocks of computed prompts with later requests that begin alike. Needs paged attention. Always off "
        "for models with linear attention, see `docs/models.md`.",
        null="True with paged attention",
    )
    admission: str = own(
        "none",
        "Whether a request that fits now may start. `none`: immediately. `router`: if all running requests "
        "will fit until they end, within `max_schedule_total_token_num`. `aimd`: the same with a limit that "
        "adapts.",
        choices=("none", "router", "aimd"),
    )
    max_schedule_total_token_num: int | None = own(
        None,
        "Maximum number of tokens that running requests may grow to together, for `router`. `aimd` starts with it.",
        unit="tokens",
        low=1,
        high=2**40,
        null="the tokens of the KV cache",
    )
    predict_output_length: bool = own(
        False,
        "Let `admission` expect outputs as long as recent ones, instead of `max_tokens`.",
    )
    fairness: bool = own(
        True, "Serve waiting API keys equally, by the tokens that they have received (virtual token counters)."
    )
    light_keys_first: bool = own(
        True,
        "Start requests of API keys with few requests first: at most a 16th of all requests, and a quarter of the "
        "largest key's. Some batch rows and blocks are kept free for them. Needs `fairness`, and changes nothing with "
        "one key.",
    )
    ttft_objective_ms: float = own(
        2000.0,
        "Objective of policy `slo` for the time to the first token, unless a request states its own.",
        unit="milliseconds",
        low=1.0,
        high=MAX_SECONDS * 1000,
    )
    tbt_objective_ms: float = own(
        200.0,
        "Objective of policy `slo` for the time between tokens, unless a request states its own.",
        unit="milliseconds",
        low=1.0,
        high=MAX_SECONDS * 1000,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The event log."""

    path: str = own("output/server.log", "File of the log, with one JSON object on each line. Its folder is created.")
    level: str = own("info", "Lowest level that is written.", choices=("debug", "info", "warning", "error"))
    log_prompts: bool = own(False, "Write prompts and outputs into the log.")
    max_mib: int = own(
        256,
        "Size at which a log is rotated: `server.log` becomes `server.log.1`. Applies to the event log and to the log "
        "of each agent. 0 turns rotation off.",
        unit="MiB",
        low=0,
        high=1024 * 1024,
    )
    keep_files: int = own(4, "Rotated files that are kept of each log.", unit="files", low=0, high=1000)
    state_interval_s: float = own(
        5.0, "Time between the `engine_state` events.", unit="seconds", low=0.1, high=MAX_SECONDS
    )
    flight_recorder: str | None = own(
        None,
        "Folder of the flight recorder, see `docs/flight_recorder.md`. It is created.",
        null="the folder `flight` next to the log",
    )
    flight_recorder_mib: int = own(
        64, "Maximum size of the flight recording. 0 turns it off.", unit="MiB", low=0, high=1024 * 1024
    )



@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters, which requests choose by their name in the field `model`. See `docs/lora.md`."""

    max_adapters: int = own(
        0,
        "Number of adapter slots: the maximum number of LoRA adapters that are loaded at the same time. 0 turns "
        "adapters off.",
        low=0,
        high=256,
    )
    max_rank: int = own(
        16, "Maximum rank of an adapter. It limits the memory of an adapter.", low=1, high=512
    )
    adapters: tuple[str, ...] | None = own(
        None,
        "Adapters to load at the start, each as `NAME=FOLDER`. The folders are those of the library PEFT, with "
        "`adapter_config.json` and `adapter_model.safetensors`.",
        null="no adapters at the start",
    )
    batching: str = own(
        "mixed",
        "Adapters of a batch. `mixed`: requests with different adapters run in the same step. `split`: a request "
        "starts when no request with another adapter runs, in the order of the queue. This is for comparison; it needs "
        "`log_config.flight_recorder_mib: 0`.",
        choices=("mixed", "split"),
    )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Metrics and traces for other systems, see `docs/observability.md`."""

    vllm_metric_names: bool = own(
        False,
        "Repeat metrics in `/metrics` under the names of vLLM. vLLM's dashboards and the Gateway API Inference "
        "Extension then work without changes.",
    )
    traces_endpoint: str | None = own(
        None,
        "URL to which traces are sent with OTLP over HTTP, for example `http://localhost:4318/v1/traces`. Needs `pip "
        "install 'llm-serving[tracing]'`.",
        null="no traces",
    )
    trace_sample_ratio: float = own(
        1.0,
        "Fraction of the requests without a header `traceparent` that are traced. A request with the header is traced "
        "if its flag `sampled` is set.",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, slots=True)
class PowerConfig:
    """Energy, see `docs/power.md`."""

    mode: str = own(
        "normal",
        "`quiet`: threads of the kernels sleep immediately instead of waiting in a loop, and a prompt waits for others "
        "up to `batch_wait_ms`. This saves energy and makes single requests slower. Texts stay the same.",
        choices=("normal", "quiet"),
    )
    batch_wait_ms: float = own(
        10.0,
        "Maximum time that a prompt waits for others in mode `quiet`, if `model_config.batch_waiting_time` is 0.",
        unit="milliseconds",
        low=0.0,
        high=10_000.0,
    )
    report_interval_s: float = own(
        60.0,
        "Time between two log events `energy`. An interval without output has none. 0: no event.",
        unit="seconds",
        low=0.0,
        high=MAX_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, see `docs/speculation.md`. It never changes a text."""

    method: str = own(
        "auto",
        "Where drafts (guesses of the next tokens) come from. `auto`: as `suffix`, but only while drafts are expected "
        "to make decoding faster. `suffix`: from earlier tokens of the same request, and from its grammar, always. "
        "`draft`: from a second model (`speculative_config.model`), while they are expected to make decoding faster. "
        "`eagle`: as `draft`, from an EAGLE-3 head (`speculative_config.model`). `mtp`: as `draft`, from the MTP layer "
        "of the model, which DeepSeek V3 has. `off`: no drafts, as always for models with linear attention.",
        choices=("auto", "off", "suffix", "draft", "eagle", "mtp"),
    )
    model: str | None = own(
        None,
        "Draft model for `method: draft`: a Hugging Face folder or a GGUF file of a small model with the same "
        "tokenizer. For `method: eagle`, the folder of an EAGLE-3 head in its published format. It is searched like "
        "`model_cfg_path`. It computes in the agents, in the types and formats of `model_config`, and needs a KV cache "
        "of its own.",
        null="none",
    )
    always: bool = own(
        False,
        "`method: draft`, `eagle` or `mtp` makes and verifies drafts in every step, even if that makes decoding "
        "slower. For tests and measurements.",
    )
    max_draft_tokens: int = own(
        7, "Maximum number of drafts of a sequence in a decode step.", unit="tokens", low=1, high=63
    )


SECTIONS: dict[str, type] = {
    "model_config": ModelConfig,
    "serving_config": ServingConfig,
    "pa_config": PagedAttentionConfig,
    "tokenizer": TokenizerConfig,
    "basic_inputs": BasicInputsConfig,
    "extra_inputs": ExtraInputsConfig,
    "warmup_inputs": WarmupInputsConfig,
    "parallel_config": ParallelConfig,
    "scheduler_config": SchedulerConfig,
    "lora_config": LoraConfig,
    "image_config": ImageConfig,
    "log_config": LogConfig,
    "telemetry_config": TelemetryConfig,
    "batch_config": BatchConfig,
    "models_config": ModelsConfig,
    "kv_tier_config": KvTierConfig,
    "kv_events_config": KvEventsConfig,
    "shadow_config": ShadowConfig,
    "power": PowerConfig,
    "speculative_config": SpeculativeConfig,
}
"""Maps the name of each YAML section to its dataclass, in the order of the documentation."""
