"""The event log as one of several models uses it: each line names the model."""

from __future__ import annotations

from llm_serving.telemetry.log import EventLog


class ModelLog(EventLog):
    """Passes events on to the server's log, with the field ``model``. It has no file of its own."""

    def __init__(self, log: EventLog, model: str) -> None:
        super().__init__(None, mirror=False)
        self._log = log
        self._model = model

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        """Write one event as a line of the server's log."""
        self._log.event(name, level=level, **{"model": self._model, **fields})
