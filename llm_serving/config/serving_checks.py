"""Refuses addresses, ports, TLS files and graphs of a server that cannot work together.

Each check raises ConfigError with key, value and reason.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any

from llm_serving.access.key_store import ENVIRONMENT_VARIABLE
from llm_serving.config.parallel_section import MAX_RANKS, ParallelConfig
from llm_serving.config.sections import TelemetryConfig
from llm_serving.config.serving_section import ServingConfig
from llm_serving.config.source import RawConfig

STOP_S = 10.0
"""Minimum seconds between ``drain_timeout_s`` and ``kill_after_s``. The server and its agents end in this time."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)


def check_telemetry(raw: RawConfig, telemetry: TelemetryConfig) -> None:
    """Checks the URL to which traces are sent."""
    endpoint = telemetry.traces_endpoint
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s@]+/\S*", endpoint):
        problem = "must be a URL with a path and without a password, as http://localhost:4318/v1/traces"
        raise raw.error("telemetry_config.traces_endpoint", endpoint, problem)


def check_serving(raw: RawConfig, serving: ServingConfig, parallel: ParallelConfig) -> None:
    """Checks the number of agents, the ports and the addresses."""
    if parallel.world_size > MAX_RANKS:
        problem = f"{_product(parallel)} makes {parallel.world_size} agents; at most {MAX_RANKS}"
        raise raw.error("parallel_config.data_parallel", parallel.data_parallel, problem)
    ports = [port for port in serving.agent_ports if port != 0]
    key, value = "serving_config.agent_ports", list(serving.agent_ports)
    if len(set(ports)) != len(ports):
        raise raw.error(key, value, "a port appears twice; each agent needs its own port")
    if len(value) != parallel.world_size and value != [0] and not parallel.is_remote:
        raise raw.error(key, value, _ports_problem(len(value), parallel))
    for name in ("server_port", "admin_port"):
        if getattr(serving, name) in ports:
            raise raw.error(
                f"serving_config.{name}",
                getattr(serving, name),
                "is also in serving_config.agent_ports; choose another port",
            )
    if serving.admin_port and serving.admin_port == serving.server_port:
        raise raw.error(
            "serving_config.admin_port", serving.admin_port, "is also serving_config.server_port; choose another port"
        )
    if not _is_loopback(raw, "serving_config.agent_ip", serving.agent_ip):
        raise raw.error("serving_config.agent_ip", serving.agent_ip, "agents listen on a loopback address only")
    for name in ("server_ip", "admin_ip"):
        address, key = getattr(serving, name), f"serving_config.{name}"
        if not _is_loopback(raw, key, address) and not serving.allow_remote:
            raise raw.error(key, address, "other machines could connect; set serving_config.allow_remote: true")
    _check_protection(raw, serving)
    if serving.kill_after_s is not None and serving.kill_after_s < serving.drain_timeout_s + STOP_S:
        problem = (
            f"must be at least {STOP_S:g} s more than serving_config.drain_timeout_s ({serving.drain_timeout_s:g} s), "
            "or the supervisor kills the server before its requests have ended"
        )
        raise raw.error("serving_config.kill_after_s", serving.kill_after_s, problem)
    try:
        _ = serving.template_day
    except ValueError:
        problem = "must be today or a date, as 2026-01-31"
        raise raw.error("serving_config.template_date", serving.template_date, problem) from None
    for origin in serving.cors_origins or ():
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            problem = "must be an origin without a path, as https://chat.example or http://localhost:3000, or *"
            raise raw.error("serving_config.cors_origins", origin, problem)
    for network in serving.trusted_proxies or ():
        if not _is_network(network):
            problem = "must be an IP address or a network, as in 10.1.0.0/16"
            raise raw.error("serving_config.trusted_proxies", network, problem)


def _check_protection(raw: RawConfig, serving: ServingConfig) -> None:
    """Checks that the TLS files are complete, and that a server that other machines can reach is protected."""
    if (serving.tls_cert is None) != (serving.tls_key is None):
        missing = "tls_key" if serving.tls_key is None else "tls_cert"
        raise raw.error(f"serving_config.{missing}", None, "is missing; TLS needs both tls_cert and tls_key")
    if serving.tls_client_ca is not None and serving.tls_cert is None:
        raise raw.error("serving_config.tls_client_ca", serving.tls_client_ca, "needs tls_cert and tls_key")
    if not serving.allow_remote or serving.allow_remote_unprotected:
        return
    has_keys = serving.api_keys_file is not None or bool(os.environ.get(ENVIRONMENT_VARIABLE, "").strip(" ;\n"))
    missing_parts = [] if has_keys or serving.tls_client_ca is not None else ["API keys (serving_config.api_keys_file)"]
    missing_parts += [] if serving.tls_cert is not None else ["TLS (serving_config.tls_cert and tls_key)"]
    if missing_parts:
        problem = (
            f"the server would have no {' and no '.join(missing_parts)}; set them, or "
            "serving_config.allow_remote_unprotected: true if a proxy or a firewall protects the server"
        )
        raise raw.error("serving_config.allow_remote", True, problem)


def agents_of_graphs(raw: RawConfig, sections: Mapping[str, Any]) -> int | None:
    """Returns the number of agents that a config of MindSpore llm-serving implies: one for each prefill graph.

    The prefill graphs are in ``model_path``. Returns None if there is at most one graph, or if the config has its own
    ``parallel_config``. Raises ConfigError if the numbers of prefill graphs, decode graphs and agents' ports differ.
    """
    graphs, decode, ports = (
        sections["model_path"].prefill_model or (),
        sections["model_path"].decode_model or (),
        sections["serving_config"].agent_ports,
    )
    key = "model_path.prefill_model"
    if graphs and decode and len(graphs) != len(decode):
        raise raw.error(
            key,
            list(graphs),
            f"has {len(graphs)} graphs, and model_path.decode_model has {len(decode)}; they must agree",
        )
    if raw.sections.get("parallel_config") or len(graphs) <= 1:
        return None
    if ports != (0,) and len(ports) != len(graphs):
        problem = f"has {len(graphs)} graphs, and serving_config.agent_ports has {len(ports)} ports; they must agree"
        raise raw.error(key, list(graphs), problem)
    return len(graphs)


def _ports_problem(num_ports: int, parallel: ParallelConfig) -> str:
    agents = "is 1 agent" if parallel.world_size == 1 else f"are {parallel.world_size} agents ({_product(parallel)})"
    return f"there {agents} and {num_ports} ports; give each agent one, or [0] for any free ones"


def _product(parallel: ParallelConfig) -> str:
    return (
        f"tensor_parallel {parallel.tensor_parallel} x pipeline_parallel {parallel.pipeline_parallel} x "
        f"data_parallel {parallel.data_parallel}"
    )


def _is_loopback(raw: RawConfig, key: str, address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise raw.error(key, address, "must be an IP address or localhost") from None


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
