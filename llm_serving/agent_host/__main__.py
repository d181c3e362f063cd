"""Runs a node as ``python -m llm_serving.agent_host``. The command ``llm-serving cluster host`` does the same."""

import sys

from llm_serving.agent_host.main import main

if __name__ == "__main__":
    sys.exit(main())
