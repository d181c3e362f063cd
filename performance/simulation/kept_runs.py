"""Stores the clients' measurements of load tests, so that simulations can be compared with them without a server."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from performance.load.client import LoadRun
from performance.load.options import LoadOptions
from performance.load.stream import RequestRecord
from performance.program import UsageError

__all__ = ["read_others", "read_runs", "write_runs"]

_RUN = ("model", "start", "started_at", "client_cpu_s", "interrupted")
_RECORD = tuple(declared.name for declared in fields(RequestRecord) if declared.name not in ("piece_times", "text"))


def write_runs(path: Path, runs: Sequence[LoadRun], others: float = 0.0) -> None:
    """Writes the runs of a load test to a JSON file, without their options.

    ``others`` is the fraction of the cores' time that other processes took during the runs.
    """
    content = [
        {name: getattr(run, name) for name in _RUN} | {"records": [_record_json(record) for record in run.records]}
        for run in runs
    ]
    path.write_bytes(orjson.dumps({"runs": content, "others": others}))


def read_runs(path: Path, options: Sequence[LoadOptions]) -> list[LoadRun]:
    """Reads runs that ``write_runs`` wrote. ``options`` are the options of these runs, which the file does not have.

    Raises UsageError if the file does not fit the options.
    """
    try:
        content = orjson.loads(path.read_bytes())["runs"]
        runs = [_run(run, asked) for run, asked in zip(content, options, strict=True)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--kept: {path} does not contain runs of these loads: {error}") from error
    for run in runs:
        if len(run.records) != run.options.count:
            raise UsageError(f"--kept: {path} has {len(run.records)} requests; the load has {run.options.count}")
    return runs


def read_others(path: Path) -> float:
    """Reads the fraction of the cores' time that other processes took. Raises UsageError if it is missing."""
    try:
        return float(orjson.loads(path.read_bytes())["others"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--kept: {path} has no fraction of time that other processes took: {error}") from error


def _record_json(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _RECORD} | {"piece_times": record.piece_times.tolist()}


def _run(content: dict[str, Any], options: LoadOptions) -> LoadRun:
    records = [
        RequestRecord(**{name: one[name] for name in _RECORD}, piece_times=array("d", one["piece_times"]))
        for one in content["records"]
    ]
    return LoadRun(options, records=records, **{name: content[name] for name in _RUN})
