#!/usr/bin/env python3
"""Replays a flight recording: ``python tools/replay.py output/flight --html timeline.html``."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.commands.own_python import TOOLS, use_own_python

use_own_python(TOOLS)

from tools.replaying.main import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # lets "replay.py ... | head" end without an error
    sys.exit(main())
