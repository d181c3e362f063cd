"""Counts the wake-ups of processes: how often each of their threads has slept."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def wake_ups(pids: Iterable[int]) -> Counter[str]:
    """Returns the number of times that each thread of the processes has slept, by ``PROCESS/THREAD NAME``."""
    found: Counter[str] = Counter()
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            text = (task / "status").read_text()
            [name] = re.findall(r"^Name:\s+(.*)$", text, re.MULTILINE)
            [count] = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)$", text, re.MULTILINE)
            found[f"{pid}/{task.name} {name}"] = int(count)
    return found


def wake_ups_in(seconds: float, pids: Iterable[int]) -> Counter[str]:
    """Waits for ``seconds``. Returns the wake-ups of each thread in this time, without threads that only slept."""
    pids = list(pids)
    before = wake_ups(pids)
    time.sleep(seconds)
    return wake_ups(pids) - before
