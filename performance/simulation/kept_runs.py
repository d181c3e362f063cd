"""What clients saw, as files: load tests as they happened, to be looked at again."""

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
    """The runs without their options, which who reads them gives. ``others``: share of the cores' time that others took
    during what they were made for."""
    content = [
        {name: getattr(run, name) for name in _RUN} | {"records": [_record_json(record) for record in run.records]}
        for run in runs
    ]
    path.write_bytes(orjson.dumps({"runs": content, "others": others}))


def read_runs(path: Path, options: Sequence[LoadOptions]) -> list[LoadRun]:
    """What ``write_runs`` wrote of runs with these options. Raises UsageError when it is something else."""
    try:
        content = orjson.loads(path.read_bytes())["runs"]
        runs = [_run(run, asked) for run, asked in zip(content, options, strict=True)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--kept: {path} is not what clients of these loads saw: {error}") from error
    for run in runs:
        if len(run.records) != run.options.count:
            raise UsageError(f"--kept: {path} has {len(run.records)} requests of a load of {run.options.count}")
    return runs


def read_others(path: Path) -> float:
    """``others`` of what ``write_runs`` wrote. Raises UsageError when it is something else."""
    try:
        return float(orjson.loads(path.read_bytes())["others"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--kept: {path} does not say what others took of the cores' time: {error}") from error


def _record_json(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _RECORD} | {"piece_times": record.piece_times.tolist()}


def _run(content: dict[str, Any], options: LoadOptions) -> LoadRun:
    records = [
        RequestRecord(**{name: one[name] for name in _RECORD}, piece_times=array("d", one["piece_times"]))
        for one in content["records"]
    ]
    return LoadRun(options, records=records, **{name: content[name] for name in _RUN})
