#!/usr/bin/env python3
"""Start the server and its agents: ``python start_server.py --config llama_tiny_cpu.yaml``. See ``--help``."""

import sys

from llm_serving.own_python import use_own_python

if __name__ == "__main__":
    use_own_python()

    from llm_serving.launcher import main

    sys.exit(main())
