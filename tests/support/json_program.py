"""Runs test programs in their own process, and reads the JSON that they print.

They need their own process, because MindSpore, its plugin and the settings of a device apply to a whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.time_limits import time_limit


def run_program(
    program: Path, *arguments: str, folder: Path, timeout: float = 120, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` with the Python of this process. ``folder`` is its working directory.

    ``variables`` change environment variables of the program; None removes a variable. Raises subprocess.TimeoutExpired
    after ``timeout`` seconds, scaled by ``time_limit``.
    """
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=time_limit(timeout),
        check=False,
    )


def printed_json(done: subprocess.CompletedProcess[str]) -> Any:
    """Returns the JSON object that a successful program printed on its last own line.

    MindSpore may print more lines after it. If the program has failed, the test fails with its output.
    """
    assert done.returncode == 0, done.stderr[-4000:]
    objects = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert objects, done.stdout[-4000:]
    return json.loads(objects[-1])
