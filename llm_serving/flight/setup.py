"""Creates the flight recorder of a scheduler, with the header of its segments."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llm_serving.flight.format import FlightRecordingError, SegmentHeader, replica_folder
from llm_serving.flight.recorder import FlightRecorder
from llm_serving.flight.ring import SegmentRing
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.scheduler import Scheduler
from llm_serving.version import __version__

if TYPE_CHECKING:
    from llm_serving.config import Config

_MEBIBYTE = 1024 * 1024
_PACKAGE = Path(__file__).resolve().parents[1]
RECORDED_CODE = (
    *("scheduler/*.py", "admission/*.py", "block_moves/*.py", "block_supply/*.py", "policies/*.py", "step_costs/*.py"),
    *("waiting/*.py", "kvcache/*.py", "request.py", "telemetry/receipt.py"),
)
"""The source files that decide what the scheduler does, as file patterns relative to ``llm_serving``. A recording
contains a digest of these files.
"""


def recorder_of(
    config: Config, scheduler: Scheduler, on_error: Callable[[str], None], replica: int = 0
) -> FlightRecorder | None:
    """Creates the flight recorder of one replica from the config. Returns None if recording is switched off.

    If there are several replicas, each has its own folder and an equal fraction of the size limit.
    """
    settings = config.log_config
    if settings.flight_recorder_mib == 0:
        return None
    folder, num_replicas = recording_folder(config, replica), config.parallel_config.data_parallel
    digest = hashlib.blake2b(json.dumps(asdict(config), sort_keys=True, default=str).encode(), digest_size=16)
    return record(
        scheduler,
        folder,
        settings.flight_recorder_mib * _MEBIBYTE // num_replicas,
        config_digest=digest.hexdigest(),
        on_error=on_error,
    )


def recording_folder(config: Config, replica: int) -> Path:
    """Returns the folder of a replica's recording."""
    folder = recordings_folder(config)
    return replica_folder(folder, replica) if config.parallel_config.data_parallel > 1 else folder


def recordings_folder(config: Config) -> Path:
    """Returns the folder of the recordings of all replicas."""
    settings = config.log_config
    return Path(settings.flight_recorder or Path(settings.path).with_name("flight"))


def record(
    scheduler: Scheduler,
    folder: Path,
    max_bytes: int,
    *,
    config_digest: str = "",
    on_error: Callable[[str], None],
    wall_clock: Callable[[], float] = time.time,
) -> FlightRecorder:
    """Returns a flight recorder of a new ``scheduler``. It writes at most ``max_bytes`` into ``folder``."""
    limits = scheduler.limits
    run = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(wall_clock()))}-{os.getpid()}-{os.urandom(2).hex()}"
    header = SegmentHeader(
        run=run,
        index=0,
        version=__version__,
        code_digest=code_digest(),
        config_digest=config_digest,
        limits=limits_to_map(limits),
        unix_time=wall_clock(),
        engine_time=0.0,
        numbers={},
    )
    return FlightRecorder(
        scheduler,
        SegmentRing(folder, max_bytes, run),
        header,
        on_error=on_error,
        wall_clock=wall_clock,
    )


@cache
def code_digest() -> str:
    """Returns a digest of the scheduler's source code.

    If the digest equals the recorded digest, a replay makes the same decisions as the recorded server.
    """
    digest = hashlib.blake2b(digest_size=16)
    for pattern in RECORDED_CODE:
        for file in sorted(_PACKAGE.glob(pattern)):
            digest.update(str(file.relative_to(_PACKAGE)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def limits_to_map(limits: SchedulerLimits) -> dict[str, Any]:
    """Returns the scheduler's limits as a map of plain values. ``limits_from_map`` is the inverse function."""
    values: dict[str, Any] = msgspec.to_builtins(limits, builtin_types=(bytes,))
    return values


def limits_from_map(values: dict[str, Any]) -> SchedulerLimits:
    """Returns the scheduler's limits from a recording's map.

    Raises FlightRecordingError if this version does not know one of the limits.
    """
    unknown = values.keys() - {declared.name for declared in fields(SchedulerLimits)}
    if unknown:
        raise FlightRecordingError(
            f"the recording has limits this version does not know: {', '.join(sorted(unknown))}."
            " Replay it with the version that recorded it."
        )
    try:
        return msgspec.convert(values, SchedulerLimits)
    except msgspec.ValidationError as error:
        raise FlightRecordingError(f"the limits {values} are invalid: {error}") from error
