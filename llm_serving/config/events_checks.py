"""Checks of the settings for events of the prefix cache."""

from __future__ import annotations

import ipaddress
import re

from llm_serving.config.config import Config
from llm_serving.config.source import RawConfig

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[0-9.]+|\*|localhost):(\d{1,5})")
_IPC = re.compile(r"ipc:///\S{1,100}")


def check_events(raw: RawConfig, config: Config) -> None:
    """Checks the addresses of the events, and that the prefix cache is on."""
    events = config.kv_events_config
    if not events.enabled:
        return
    if not config.uses_prefix_cache:
        problem = "there is no prefix cache; set scheduler_config.prefix_cache: true"
        raise raw.error("kv_events_config.enabled", True, problem)
    for name in ("endpoint", "replay_endpoint"):
        _check_endpoint(raw, f"kv_events_config.{name}", getattr(events, name), events.allow_remote)
    port = events.endpoint.rpartition(":")[2]
    if events.endpoint == events.replay_endpoint and port != "0":
        raise raw.error(
            "kv_events_config.replay_endpoint",
            events.endpoint,
            "is also kv_events_config.endpoint; choose another address",
        )


def _check_endpoint(raw: RawConfig, key: str, endpoint: str | None, allow_remote: bool) -> None:
    if endpoint is None or _IPC.fullmatch(endpoint):
        return
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found[2]) > 65535:
        raise raw.error(key, endpoint, "must be tcp://ADDRESS:PORT or ipc:///PATH, as tcp://127.0.0.1:5557")
    host = found[1].strip("[]")
    try:
        is_loopback = host == "localhost" or (host != "*" and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        raise raw.error(key, endpoint, f"{host!r} is not an IP address") from None
    if not is_loopback and not allow_remote:
        problem = "other machines could read prompts as token ids; set kv_events_config.allow_remote: true"
        raise raw.error(key, endpoint, problem)
