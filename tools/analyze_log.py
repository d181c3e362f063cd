#!/usr/bin/env python3
"""Analyses a server's event log: ``python tools/analyze_log.py output/server.log --html report.html``."""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.commands.own_python import TOOLS, use_own_python

use_own_python(TOOLS)

from tools.log_analysis.main import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # lets "analyze_log.py ... | head" end without an error
    sys.exit(main())
