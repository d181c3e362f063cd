"""Creates the access control from the configuration."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.access.audit import AuditLog
from llm_serving.access.control import AccessControl
from llm_serving.access.key_store import KeyLog, KeyStore
from llm_serving.access.tls import open_tls
from llm_serving.config.serving_section import ServingConfig
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.log_file import Rotation


def open_access(
    serving: ServingConfig,
    environment: str,
    log: KeyLog,
    refused: Callable[[str], None],
    rotation: Rotation | None = None,
) -> AccessControl | None:
    """Returns the access control, or None if there are no API keys and no audit log. Raises ConfigError.

    ``environment`` is the value of the variable ``LLM_SERVING_API_KEYS``. ``refused`` is called with the reason of each
    refusal. ``rotation`` limits the size of the audit log.
    """
    keys = KeyStore(serving.api_keys_file, environment, log)
    audit = None if serving.audit_log is None else AuditLog(serving.audit_log, rotation)
    if not len(keys) and audit is None:
        return None
    return AccessControl(keys if len(keys) else None, audit, refused)


def check_access_files(serving: ServingConfig, environment: str) -> None:
    """Reads the certificate and the API keys and forgets them. Raises ConfigError if the start would refuse them.

    ``environment`` is the value of the variable ``LLM_SERVING_API_KEYS``.
    """
    with EventLog(None) as log:
        open_tls(serving, log)
        KeyStore(serving.api_keys_file, environment, log)
