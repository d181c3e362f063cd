#!/usr/bin/env python3
"""Shows what this machine can run, and what prevents it: ``python tools/doctor.py [--config FILE]``.

The program also explains error codes and logs: ``python tools/doctor.py explain EI0006`` or ``... explain FILE``. See
``--help``.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if sys.version_info < (3, 10):  # noqa: UP036 - an old Python gets a message instead of a traceback
    sys.stderr.write("error: Python 3.10 to 3.12 is needed, this is " + sys.version.split()[0] + "; run: make setup\n")
    sys.exit(1)

from llm_serving.commands.own_python import prefer_own_python

if __name__ == "__main__":
    prefer_own_python()
    from tools.diagnosis.main import main

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # lets "doctor.py ... | head" end without an error
    sys.exit(main())
