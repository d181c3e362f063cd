#!/usr/bin/env python3
"""Makes a deployment config: ``python tools/import_chat_configuration.py configuration.json --output chat.yaml``.

The input is the ``configuration.json`` of an older ``/chat`` server. See ``docs/chat_configuration.md``.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.commands.own_python import prefer_own_python

if __name__ == "__main__":
    prefer_own_python(("yaml", "msgspec"))
    from tools.chat_import.main import main

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # lets "import_chat_configuration.py ... | head" end without an error
    sys.exit(main())
