"""Keeps a flight recording that shows a failure. Hard links to its segments go to another folder, where the recorder
deletes nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from llm_serving.flight.format import SUFFIX

MAX_KEPT = 4
"""Maximum number of kept recordings. If there are more, the oldest are deleted."""
_PREFIX = "kept-"


def keep_recording(folder: Path, reason: str) -> Path | None:
    """Creates a subfolder of ``folder`` with hard links to the segments of the recording. Returns the subfolder.

    Returns None if there is no segment, or if the file system refuses the links. The recorder's present segment
    continues to grow in both folders. ``reason`` becomes a part of the subfolder's name. If there are more than
    ``MAX_KEPT`` subfolders, the oldest ones are deleted.
    """
    try:
        segments = sorted(folder.glob(f"*{SUFFIX}"))
        if not segments:
            return None
        kept = folder / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{time.monotonic_ns()}-{reason}"
        kept.mkdir(mode=0o700)
        for segment in segments:
            os.link(segment, kept / segment.name)
        for old in sorted(folder.glob(f"{_PREFIX}*"))[:-MAX_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return None
    return kept
