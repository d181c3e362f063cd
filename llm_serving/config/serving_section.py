"""The section ``serving_config``: addresses, limits and timeouts of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date

from llm_serving.config.schema import MAX_SECONDS, own, published, without_effect
from llm_serving.parsing.formats import REASONING_FORMATS, TOOL_FORMATS

DEFAULT_ROW_CHECK_INTERVAL = 500
"""Default number of decode steps between two row checks, which are a self-check of the agents."""
DEFAULT_SERVER_PORT = 8835
"""Default of ``serving_config.server_port``. A test compares it with the port in the documentation."""

TODAY = "today"
"""Value of ``template_date`` for the date of the machine."""


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
        "Port of a listener of its own for administration. It has `/metrics`, `/server_info`, `/requests`, `/profile`, "
        "the page `/operator`, and the routes for LoRA adapters, nodes, models and shadow serving. 0 takes any free "
        "port. The other listeners then do not have these routes.",
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
        "OpenAI's API, as temperature 1. Otherwise the path of another JSON file with these keys. If the command line "
        "names another model, a path in the YAML counts as `model`.",
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
    kill_after_s: float | None = own(
        None,
        "Time after SIGTERM at which the supervisor kills the server: `TimeoutStopSec` of systemd, "
        "`terminationGracePeriodSeconds` of Kubernetes. If it is set, it must be at least 10 s more than "
        "`drain_timeout_s`, otherwise the start is refused.",
        unit="seconds",
        low=1.0,
        high=MAX_SECONDS,
        null="unknown",
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
    template_date: str = own(
        TODAY,
        "Date in the prompts of models whose chat template writes one with `strftime_now`, as that of Llama 3.2. "
        "`today`: the date of the machine, so equal requests have other prompts on another day. Otherwise a date, for "
        "example `2026-01-31`; its time is midnight.",
    )
    canary_interval_s: float = own(
        300.0,
        "Time between two runs of a fixed prompt (canary), whose tokens must stay the same. The first run is compared "
        "with the stored tokens of earlier servers. 0 turns the check off.",
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

    @property
    def template_day(self) -> date | None:
        """The date that ``template_date`` states, or None for the present one. Raises ValueError for other texts."""
        if self.template_date == TODAY:
            return None
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", self.template_date):
            raise ValueError(f"{self.template_date!r} is no date")
        return date.fromisoformat(self.template_date)
