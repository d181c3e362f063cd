"""The table of wrong configs and their errors, for tests/config/test_bad_configs.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.errors import CheckpointError, ConfigError, LLMServingError

FILE = "<file>"


@dataclass(frozen=True)
class Case:
    """The text of a YAML file and the error that it must cause.

    ``FILE`` stands for the path of the YAML file, and ``<model>`` stands for the path of the model folder.
    """

    name: str
    text: str
    message: str
    overrides: tuple[str, ...] = ()
    error: type[LLMServingError] = ConfigError
    folder: dict[str, object] = field(default_factory=dict)


MODEL = "model_config: {model_path: <model>}"


def in_model(keys: str) -> str:
    return f"model_config: {{model_path: <model>, {keys}}}"


def with_section(section: str) -> str:
    return f"{MODEL}\n{section}"


SERVING = "serving_config: "

LATENT: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
HYBRID: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

CASES = [
    # Logits processors.
    Case(
        "logits processor without a class",
        in_model("logits_processors: [my_rules]"),
        f"{FILE}: model_config.logits_processors = 'my_rules': must have the form module:Class",
    ),
    Case(
        "logits processors without masks",
        in_model("logits_processors: ['a:B']"),
        f"{FILE}: model_config.logits_processors = ['a:B']: the agents change logits in steps with token masks; use "
        "serving_config.structured_outputs: true",
        ("serving_config.structured_outputs=false",),
    ),
    Case(
        "gpt-oss with an int8 cache and native operators",
        in_model("model_dtype: float16, op_table: native, kv_format: int8"),
        f"{FILE}: model_config.kv_format = 'int8': attention with sinks needs a cache of floats with native operators; "
        "use auto",
        folder={"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # Configs of a model with linear attention with settings that it cannot use.
    Case(
        "linear attention with the native operators",
        in_model("model_dtype: float16, op_table: native"),
        f"{FILE}: model_config.op_table = 'native': the native operators have no Gated DeltaNet and no states of "
        "sequences for Qwen3NextForCausalLM; use op_table fused (CPU)",
        folder=HYBRID,
    ),
    Case(
        "linear attention with sums in parts",
        with_section("parallel_config: {sum_parts: 2}"),
        f"{FILE}: parallel_config.sum_parts = 2: the model has linear attention, whose sums have no parts; use 1",
        folder={"architectures": ["Qwen3_5ForCausalLM"], "layer_types": HYBRID["layer_types"]},
    ),
    Case(
        "more agents than key heads of linear attention",
        with_section("parallel_config: {tensor_parallel: 4}\n" + SERVING + "{agent_ports: [0]}"),
        f"{FILE}: parallel_config.tensor_parallel = 4: the model has 2 key heads of linear attention: at most 2 agents "
        "can share them",
        folder=HYBRID | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    Case(
        "linear attention without an MTP layer",
        with_section("speculative_config: {method: mtp}"),
        f"{FILE}: speculative_config.method = 'mtp': needs an MTP layer, and the model's folder has no tensor "
        "mtp.norm.weight; set auto",
        folder=HYBRID,
    ),
    Case(
        "shared folder without host blocks",
        with_section("kv_tier_config: {shared_folder: /mnt/kv}"),
        f"{FILE}: kv_tier_config.shared_folder = '/mnt/kv': needs host memory on the way to the disk; "
        "set kv_tier_config.host_blocks above 0",
    ),
    Case(
        "candidate that is no model",
        with_section("shadow_config: {model: next}"),
        f"{FILE}: shadow_config.model = 'next': is not in models_config.models; add it there",
    ),
    Case(
        "linear attention with KV tiers",
        with_section("kv_tier_config: {host_blocks: 8}"),
        f"{FILE}: kv_tier_config.host_blocks = 8: keeps blocks, and the states of Qwen3NextForCausalLM are in no "
        "blocks; use 0",
        folder=HYBRID,
    ),
    Case(
        "linear attention with separate prefill and decode",
        with_section(
            "parallel_config: {data_parallel: 2, roles: [prefill, decode]}\n" + SERVING + "{agent_ports: [0, 0]}"
        ),
        f"{FILE}: parallel_config.roles = ['prefill', 'decode']: Qwen3NextForCausalLM has states that blocks do not "
        "contain; use no roles",
        folder=HYBRID,
    ),
    # Configs of DeepSeek models with settings that these models cannot use.
    Case(
        "int8 KV cache with latent attention",
        in_model("kv_format: int8"),
        f"{FILE}: model_config.kv_format = 'int8': latent attention needs a cache of floats; use auto",
        folder=LATENT,
    ),
    Case(
        "sums in parts with latent attention",
        with_section("parallel_config: {sum_parts: 2}"),
        f"{FILE}: parallel_config.sum_parts = 2: the model has experts, whose sums have no parts; use 1",
        folder=LATENT,
    ),
    Case(
        "experts of a model without experts",
        with_section("parallel_config: {expert_parallel: True, tensor_parallel: 2}\n" + SERVING + "{agent_ports: [0]}"),
        f"{FILE}: parallel_config.expert_parallel = True: the model has no experts; use False",
    ),
    Case(
        "whole experts of a single agent",
        with_section("parallel_config: {expert_parallel: True}"),
        f"{FILE}: parallel_config.expert_parallel = True: divides the experts among the agents of tensor_parallel, "
        "which is 1; use False",
        folder=LATENT,
    ),
    Case(
        "a latent vector of queries that groups of weights do not divide",
        in_model("weight_format: int4, weight_group: 32"),
        f"{FILE}: model_config.weight_group = 32: must be 32, 64 or 128 and divide the model's q_lora_rank of 48",
        folder=LATENT,
    ),
    # Formats of weights and of the KV cache that do not fit the other settings.
    Case(
        "bf16 weights in another type",
        in_model("model_dtype: float16, weight_format: bf16"),
        f"{FILE}: model_config.weight_format = 'bf16': needs model_dtype bfloat16, which is float16",
    ),
    Case(
        "groups that do not fill a row",
        in_model("weight_format: int4, weight_group: 128"),
        f"{FILE}: model_config.weight_group = 128: must be 32, 64 or 128 and divide the model's hidden size of 64",
    ),
    Case(
        "an Ascend's layout of weights on a CPU",
        in_model("weight_format: int8, weight_layout: nz"),
        f"{FILE}: model_config.weight_layout = 'nz': is for an Ascend, and the device is CPU; use nd",
    ),
    Case(
        "captured launches on a CPU",
        in_model("capture_launches: true"),
        f"{FILE}: model_config.capture_launches = True: is for an Ascend, and the device is CPU; use False",
    ),
    Case(
        "a core that is not there",
        in_model("cpu_cores: [0, 4095]"),
        f"{FILE}: model_config.cpu_cores = [0, 4095]: there is no core 4095 for this process",
    ),
    # Keys and sections that do not exist.
    Case(
        "unknown key",
        with_section("pa_config: {num_block: 7}"),
        f"{FILE}: pa_config.num_block = 7: unknown key; did you mean 'num_blocks'?",
    ),
    Case(
        "key of another section",
        in_model("num_blocks: 9"),
        f"{FILE}: model_config.num_blocks = 9: unknown key; did you mean 'pa_config.num_blocks'?",
    ),
    Case(
        "key like no other",
        with_section("pa_config: {xyz: [1]}"),
        f"{FILE}: pa_config.xyz = [1]: unknown key; choose one of block_size, decode_seq_length, num_",
    ),
    Case("unknown section", "model_confg: {}", f"{FILE}: unknown section 'model_confg'; did you mean 'model_config'?"),
    Case("section that is no mapping", "pa_config: 5", f"{FILE}: pa_config = 5: a section must be a mapping of keys"),
    Case(
        "unknown key on the command line",
        MODEL,
        "--set 'pa_config.num_bloks=1': unknown key 'pa_config.num_bloks'; did you mean 'num_blocks'?",
        ("pa_config.num_bloks=1",),
    ),
    Case(
        "unknown section on the command line",
        MODEL,
        "--set 'pa_cfg.num_blocks=1': unknown section 'pa_cfg'; did you mean 'pa_config'?",
        ("pa_cfg.num_blocks=1",),
    ),
    Case(
        "override without value",
        MODEL,
        "--set 'pa_config.num_blocks': must be section.key=value",
        ("pa_config.num_blocks",),
    ),
    Case("override without section", MODEL, "--set 'num_blocks=1': must be section.key=value", ("num_blocks=1",)),
    Case(
        "override that is no YAML",
        MODEL,
        "--set pa_config.num_blocks:1: not valid YAML: ",
        ("pa_config.num_blocks=[1",),
    ),
    # Wrong types.
    Case(
        "text for an integer",
        with_section("pa_config: {num_blocks: many}"),
        f"{FILE}: pa_config.num_blocks = 'many': must be an integer or auto, not text",
    ),
    Case(
        "boolean for an integer",
        with_section("pa_config: {num_blocks: true}"),
        f"{FILE}: pa_config.num_blocks = True: must be an integer or auto, not true or false",
    ),
    Case(
        "float for an integer",
        with_section("pa_config: {block_size: 16.0}"),
        f"{FILE}: pa_config.block_size = 16.0: must be an integer or auto, not a number",
    ),
    Case(
        "integer for a boolean",
        in_model("page_attention: 1"),
        f"{FILE}: model_config.page_attention = 1: must be true or false, not an integer",
    ),
    Case(
        "YAML 1.1 boolean",
        in_model("page_attention: yes"),
        f"{FILE}: model_config.page_attention = 'yes': must be true or false, not text",
    ),
    Case(
        "integer for text",
        in_model("model_name: 7"),
        f"{FILE}: model_config.model_name = 7: must be text, not an integer",
    ),
    Case(
        "integer for a list",
        in_model("seq_length: 4096"),
        f"{FILE}: model_config.seq_length = 4096: must be a list of an integer, as in [1]",
    ),
    Case("empty list", in_model("seq_length: []"), f"{FILE}: model_config.seq_length = []: must not be empty"),
    Case(
        "text in a list",
        in_model("seq_length: [4096, long]"),
        f"{FILE}: model_config.seq_length = 'long': must be an integer or auto, not text",
    ),
    Case(
        "null where there is none",
        with_section("pa_config: {num_blocks: null}"),
        f"{FILE}: pa_config.num_blocks = null: must be an integer, not null",
    ),
    Case("empty text", in_model('model_dtype: ""'), f"{FILE}: model_config.model_dtype = '': must not be empty"),
    Case(
        "wrong type on the command line",
        MODEL,
        "command line: pa_config.num_blocks = 'x': must be an integer or auto, not text",
        ("pa_config.num_blocks=x",),
    ),
    # Values that are unknown or out of range.
    Case(
        "too small",
        with_section("pa_config: {num_blocks: 0}"),
        f"{FILE}: pa_config.num_blocks = 0: must be at least 2",
    ),
    Case(
        "too large",
        with_section(SERVING + "{server_port: 65536}"),
        f"{FILE}: serving_config.server_port = 65536: must be at most 65535",
    ),
    Case(
        "negative in a list",
        with_section(SERVING + "{agent_ports: [-1]}"),
        f"{FILE}: serving_config.agent_ports = -1: must be at least 0",
    ),
    Case(
        "huge number",
        with_section("log_config: {state_interval_s: 1" + "0" * 400 + "}"),
        "log_config.state_interval_s = inf: must be a finite number",
    ),
    Case(
        "unknown type",
        in_model("model_dtype: bfloat61"),
        f"{FILE}: model_config.model_dtype = 'bfloat61': unknown value; did you mean 'bfloat16'?",
    ),
    Case(
        "unknown policy",
        with_section("scheduler_config: {policy: fifo}"),
        f"{FILE}: scheduler_config.policy = 'fifo': unknown value; choose one of chunked, "
        "decode_first, fcfs, prefill_first, slo",
    ),
    Case(
        "unknown inputs",
        with_section("basic_inputs: {type: LamaBasicInputs}"),
        f"{FILE}: basic_inputs.type = 'LamaBasicInputs': unknown value; did you mean 'LlamaBasicInputs'?",
    ),
    Case(
        "name that breaks a URL",
        in_model("model_name: a/b"),
        f"{FILE}: model_config.model_name = 'a/b': must begin with a letter or digit",
    ),
    # Values that the parser knows, but that this version does not support.
    Case(
        "unknown batching",
        in_model("batching_strategy: statik"),
        f"{FILE}: model_config.batching_strategy = 'statik': unknown value; did you mean 'static'?",
    ),
    Case(
        "shared blocks in one piece",
        in_model("page_attention: False") + "\nscheduler_config: {prefix_cache: true}",
        f"{FILE}: scheduler_config.prefix_cache = True: shares blocks between requests, which needs "
        "model_config.page_attention: True",
    ),
    Case(
        "more chunk than step",
        with_section("scheduler_config: {max_num_batched_tokens: 500, chunk_tokens: 501}"),
        f"{FILE}: scheduler_config.chunk_tokens = 501: must be at most 500, the tokens of a step",
    ),
    Case(
        "more batch than rows",
        in_model("decode_batch_size: [4], batch_size: 5"),
        f"{FILE}: model_config.batch_size = 5: must be at most 4, the sequences that run at a time (max_num_seqs)",
    ),
    Case(
        "cursor input",
        in_model("current_index: True"),
        f"{FILE}: model_config.current_index = True: graphs with a cursor input are not available",
    ),
    # Values that are valid alone, but contradict each other.
    Case(
        "more ports than agents",
        with_section(SERVING + "{agent_ports: [16002, 16003]}"),
        f"{FILE}: serving_config.agent_ports = [16002, 16003]: there is 1 agent and 2 ports; give each agent one",
    ),
    Case(
        "fewer ports than agents",
        with_section(
            SERVING + "{agent_ports: [16002, 16003]}\nparallel_config: {tensor_parallel: 2, data_parallel: 2}"
        ),
        f"{FILE}: serving_config.agent_ports = [16002, 16003]: there are 4 agents (tensor_parallel 2 x "
        "pipeline_parallel 1 x data_parallel 2) and 2 ports; give each agent one, or [0] for any free ones",
    ),
    Case(
        "sums in parts of a group",
        with_section(SERVING + "{agent_ports: [0]}\nparallel_config: {tensor_parallel: 2, sum_parts: 2}"),
        f"{FILE}: parallel_config.sum_parts = 2: tensor_parallel is 2: its agents are the parts; use 1",
    ),
    Case(
        "port twice",
        with_section(SERVING + "{agent_ports: [16002, 16002]}"),
        f"{FILE}: serving_config.agent_ports = [16002, 16002]: a port appears twice; each agent needs its own port",
    ),
    Case(
        "port of server and agent",
        with_section(SERVING + "{agent_ports: [8835]}"),
        f"{FILE}: serving_config.server_port = 8835: is also in serving_config.agent_ports; choose another port",
    ),
    Case(
        "open to the world",
        with_section(SERVING + "{server_ip: 0.0.0.0}"),
        f"{FILE}: serving_config.server_ip = '0.0.0.0': other machines could connect; set "
        "serving_config.allow_remote: true",
    ),
    Case(
        "administration open to the world",
        with_section(SERVING + "{admin_ip: 0.0.0.0}"),
        f"{FILE}: serving_config.admin_ip = '0.0.0.0': other machines could connect; set "
        "serving_config.allow_remote: true",
    ),
    Case(
        "remote without keys and TLS",
        with_section(SERVING + "{allow_remote: true}"),
        f"{FILE}: serving_config.allow_remote = True: the server would have no API keys (serving_config.api_keys_file) "
        "and no TLS (serving_config.tls_cert and tls_key); set them, or serving_config.allow_remote_unprotected: true "
        "if a proxy or a firewall protects the server",
    ),
    Case(
        "remote without TLS",
        with_section(SERVING + "{allow_remote: true, api_keys_file: keys}"),
        f"{FILE}: serving_config.allow_remote = True: the server would have no TLS (serving_config.tls_cert and "
        "tls_key); set them, or serving_config.allow_remote_unprotected: true if a proxy or a firewall protects the "
        "server",
    ),
    Case(
        "remote without keys",
        with_section(SERVING + "{allow_remote: true, tls_cert: c, tls_key: k}"),
        f"{FILE}: serving_config.allow_remote = True: the server would have no API keys (serving_config.api_keys_file)"
        "; set them, or serving_config.allow_remote_unprotected: true if a proxy or a firewall protects the server",
    ),
    Case(
        "certificate without a key",
        with_section(SERVING + "{tls_cert: c}"),
        f"{FILE}: serving_config.tls_key = null: is missing; TLS needs both tls_cert and tls_key",
    ),
    Case(
        "key without a certificate",
        with_section(SERVING + "{tls_key: k}"),
        f"{FILE}: serving_config.tls_cert = null: is missing; TLS needs both tls_cert and tls_key",
    ),
    Case(
        "certificates of clients without TLS",
        with_section(SERVING + "{tls_client_ca: c}"),
        f"{FILE}: serving_config.tls_client_ca = 'c': needs tls_cert and tls_key",
    ),
    Case(
        "port of server and administration",
        with_section(SERVING + "{admin_port: 8835}"),
        f"{FILE}: serving_config.admin_port = 8835: is also serving_config.server_port; choose another port",
    ),
    Case(
        "time to drain and time of the supervisor",
        with_section(SERVING + "{drain_timeout_s: 60, kill_after_s: 45}"),
        f"{FILE}: serving_config.kill_after_s = 45.0: must be at least 10 s more than serving_config.drain_timeout_s "
        "(60 s), or the supervisor kills the server before its requests have ended",
    ),
    *(
        Case(
            f"a date that is none: {text}",
            with_section(SERVING + f"{{template_date: {text}}}"),
            f"{FILE}: serving_config.template_date = '{text}': must be today or a date, as 2026-01-31",
        )
        for text in ("2026-02-30", "2026-1-31", "2026-W05-1", "now")
    ),
    Case(
        "port of administration and agent",
        with_section(SERVING + "{agent_ports: [9000], admin_port: 9000}"),
        f"{FILE}: serving_config.admin_port = 9000: is also in serving_config.agent_ports; choose another port",
    ),
    Case(
        "users of the UNIX socket",
        with_section(SERVING + "{unix_socket_users: groups}"),
        f"{FILE}: serving_config.unix_socket_users = 'groups': unknown value; did you mean 'group'?",
    ),
    Case(
        "agent open to the world",
        with_section(SERVING + "{agent_ip: 10.0.0.1, allow_remote: true, allow_remote_unprotected: true}"),
        f"{FILE}: serving_config.agent_ip = '10.0.0.1': agents listen on a loopback address only",
    ),
    Case(
        "proxy that is no address",
        with_section(SERVING + "{trusted_proxies: [10.1.0.0/16, proxy.example]}"),
        f"{FILE}: serving_config.trusted_proxies = 'proxy.example': must be an IP address or a network, as in "
        "10.1.0.0/16",
    ),
    Case(
        "address that is none",
        with_section(SERVING + "{server_ip: example.org}"),
        f"{FILE}: serving_config.server_ip = 'example.org': must be an IP address or localhost",
    ),
    Case(
        "native operators in float32",
        in_model("op_table: native, model_dtype: float32"),
        f"{FILE}: model_config.op_table = 'native': cannot be used with model_dtype float32: the primitives "
        "ApplyRotaryPosEmb, ReshapeAndCache and PagedAttention take float16 and bfloat16 only; use op_table fused",
    ),
    Case(
        "graph engine on a CPU",
        in_model("backend: ge"),
        f"{FILE}: model_config.backend = 'ge': the graph engine runs on an Ascend only; on a CPU use kbk",
    ),
    Case(
        "cache smaller than a sequence",
        with_section("pa_config: {num_blocks: 256}"),
        f"{FILE}: pa_config.num_blocks = 256: 256 blocks of 16 tokens, less the padding block, hold 4080 tokens: "
        "not one sequence of 4096; use at least 257 blocks, or a pa_config.decode_seq_length of 4081 at most",
    ),
    Case(
        "more slots than an index counts",
        with_section("pa_config: {num_blocks: 2097152, block_size: 1024}"),
        f"{FILE}: pa_config.num_blocks = 2097152: num_blocks x block_size = 2147483648; at most 2147483647",
    ),
    Case(
        "step smaller than a decode",
        MODEL,
        "command line: scheduler_config.max_num_batched_tokens = 64: must be at least "
        "128, a token for each sequence of a decode step",
        ("scheduler_config.max_num_batched_tokens=64",),
    ),
    # Models that are missing or unsupported, or that contradict their settings.
    Case(
        "no such folder",
        "model_config: {model_path: /no/such/folder}",
        f"{FILE}: model_config.model_path = '/no/such/folder': no such file or folder",
    ),
    Case(
        "no model at all",
        "{}",
        f"{FILE}: model_config.model_path = null: there are no weights to load; name a Hugging Face folder",
    ),
    Case(
        "sizes not known",
        "model_config: {load_format: dummy}",
        f"{FILE}: model_config.model_path = null: the model's sizes are not known",
    ),
    Case(
        "vocabulary of another model",
        in_model("vocab_size: 32000"),
        f"{FILE}: model_config.vocab_size = 32000: <model>/config.json has vocab_size 300",
    ),
    Case(
        "vocabulary on the command line",
        MODEL,
        "command line: model_config.vocab_size = 5: <model>/config.json has vocab_size 300",
        ("model_config.vocab_size=5", "model_config.model_path=<model>"),
    ),
    Case(
        "end token past the vocabulary",
        in_model("end_token: 300"),
        f"{FILE}: model_config.end_token = 300: must be below vocab_size = 300",
    ),
    Case(
        "no tokenizer",
        MODEL,
        f"{FILE}: tokenizer.type = 'auto': <model> has no tokenizer.json or tokenizer.model or vocab.json",
        folder={"files": ("model.safetensors",)},
    ),
    Case(
        "tokenizer of another kind",
        with_section("tokenizer: {type: LlamaTokenizer}"),
        f"{FILE}: tokenizer.type = 'LlamaTokenizer': <model> has no tokenizer.model",
    ),
    Case(
        "tokenizer file that is not there",
        with_section("tokenizer: {vocab_file: ./gone/tokenizer.model}"),
        f"{FILE}: tokenizer.vocab_file = './gone/tokenizer.model': no such file or folder",
    ),
    Case(
        "pickles only",
        MODEL,
        "<model>/pytorch_model.bin: PyTorch pickles are not loaded, as they can run code; convert the folder",
        error=CheckpointError,
        folder={"files": ("pytorch_model.bin", "tokenizer.json")},
    ),
    Case(
        "no weights",
        MODEL,
        "<model>: there are no *.safetensors files; model_config.load_format=dummy serves random weights",
        error=CheckpointError,
        folder={"files": ("tokenizer.json",)},
    ),
    # Files that are not configs.
    Case("no mapping", "- 1\n- 2\n", f"{FILE}: must hold a mapping of sections, not list"),
    Case("empty", "", f"{FILE}: must hold a mapping of sections, not NoneType"),
    Case("not YAML", "a: [1\nb: 2\n", f"{FILE}:2: not valid YAML: "),
    Case("duplicate key", "pa_config:\n  num_blocks: 1\n  num_blocks: 2\n", f"{FILE}:3: duplicate key 'num_blocks'"),
    Case("duplicate section", "pa_config: {}\npa_config: {}\n", f"{FILE}:2: duplicate key 'pa_config'"),
    Case("tag", "model_config: !!python/object/apply:os.system ['true']", f"{FILE}:1: not valid YAML: could not deter"),
    Case("two documents", "a: 1\n---\nb: 2\n", f"{FILE}:2: not valid YAML: but found another document"),
    Case("deep", "a: " + "[" * 50_000, f"{FILE}:1: nested deeper than 32 levels"),
    Case("key that is a list", "? [a]\n: 1\n", f"{FILE}:1: a key must be plain text"),
    Case("huge", "#" * 70_000, f"{FILE}: has 70000 bytes; at most 65536 are read"),
]
