"""The audit log: one line for each request, with key name, route, status, number of tokens and time. It contains no
prompts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from llm_serving.access.quotas import Allowance
from llm_serving.errors import ConfigError
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.log_file import Rotation

STRANGERS_PER_MINUTE = 600
"""Maximum number of lines per minute for requests without a valid key. Without a limit, anyone could fill the disk."""


class AuditLog:
    """Writes the audit log to a file that only the server's user can read.

    Raises ConfigError if the file cannot be created.
    """

    def __init__(self, path: str, rotation: Rotation | None = None) -> None:
        _make_private(path)
        self._log = EventLog(path, "info", mirror=False, rotation=rotation)
        self._strangers = Allowance(STRANGERS_PER_MINUTE, time.monotonic())
        self._num_skipped = 0

    def note(
        self,
        *,
        key: str,
        client: str | None,
        method: str,
        route: str,
        status: int,
        prompt_tokens: int,
        output_tokens: int,
        duration_s: float,
    ) -> None:
        """Writes the line of one request to the audit log. At most ``STRANGERS_PER_MINUTE`` lines with status 401 are
        written per minute.
        """
        if status == 401:
            if self._strangers.wait_s(1, time.monotonic()) > 0.0:
                self._num_skipped += 1
                return
            self._strangers.take(1)
        self._log.event(
            "access",
            key=key,
            client=client,
            method=method[:16],
            route=route,
            status=status,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            duration_ms=round(duration_s * 1000.0, 3),
            skipped=self._num_skipped,
        )
        self._num_skipped = 0

    def close(self) -> None:
        self._log.close()


def _make_private(path: str) -> None:
    """Creates the log file. If it exists, removes the access rights of other users."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"serving_config.audit_log: cannot open {path!r}: {error.strerror or error}") from error
