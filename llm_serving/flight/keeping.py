"""Keeps a flight recording that shows a failure: links its segments into another folder, which the recorder does not
clear.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from llm_serving.flight.format import SUFFIX

MAX_KEPT = 4
"""Maximum number of kept recordings. The oldest one is deleted."""
_PREFIX = "kept-"


def keep_recording(folder: Path, reason: str) -> Path | None:
    """Link the segments of a recording into a new folder in ``folder``. Returns the new folder.

    Returns None if there is no segment. The recorder's present segment continues to grow in both folders. ``reason``
    becomes a part of the folder's name.
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
