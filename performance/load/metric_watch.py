"""A server's ``/metrics``: all of them at a moment, or one looked at now and then during a run."""

from __future__ import annotations

import http.client
import threading

from performance.load.endpoint import Endpoint

__all__ = ["MetricWatch", "fetch_metrics", "read_metrics"]

INTERVAL_S = 0.5
TIMEOUT_S = 5.0


class MetricWatch:
    """The mean of a gauge while another one is above 0. Use as a context manager around the run."""

    def __init__(self, endpoint: Endpoint, gauge: str, while_above: str) -> None:
        self._endpoint = endpoint
        self._gauge, self._while_above = gauge, while_above
        self._stop = threading.Event()
        self._values: list[float] = []
        self._thread = threading.Thread(target=self._watch, name="metric-watch", daemon=True)

    def __enter__(self) -> MetricWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mean(self) -> float | None:
        """None when the server has no such gauge, or was never seen at work."""
        return sum(self._values) / len(self._values) if self._values else None

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            gauges = fetch_metrics(self._endpoint)
            if gauges.get(self._while_above, 0.0) > 0 and self._gauge in gauges:
                self._values.append(gauges[self._gauge])


def fetch_metrics(endpoint: Endpoint) -> dict[str, float]:
    """All values by name and labels. Empty when the server has none, or does not answer: the run itself will tell."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{endpoint.prefix}/metrics")
        response = connection.getresponse()
        is_exposition = response.status == 200 and response.getheader("Content-Type", "").startswith("text/plain")
        return read_metrics(response.read().decode()) if is_exposition else {}
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return {}
    finally:
        connection.close()


def read_metrics(text: str) -> dict[str, float]:
    """Values of Prometheus' text format by name with labels, as ``name{label="value"}``."""
    metrics = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            metrics[name] = float(value)
    return metrics
