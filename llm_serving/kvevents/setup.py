"""Checks that the package for events of the prefix cache is installed."""

from __future__ import annotations

import importlib.util

from llm_serving.errors import ConfigError


def check_package() -> None:
    """Raises ConfigError if the package for ZeroMQ is not installed."""
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError(
            "kv_events_config.enabled needs the Python package pyzmq, which is not installed; run "
            "pip install 'llm-serving[events]', or remove the setting"
        )
