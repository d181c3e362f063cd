"""The event log of one of several models: it adds the model's name to each line."""

from __future__ import annotations

from llm_serving.telemetry.log import EventLog


class ModelLog(EventLog):
    """Passes events to the server's log, and adds the field ``model`` to each. This log has no file of its own."""

    def __init__(self, log: EventLog, model: str) -> None:
        super().__init__(None, mirror=False)
        self._log = log
        self._model = model

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        """Writes one event as a line of the server's log."""
        self._log.event(name, level=level, **{"model": self._model, **fields})
