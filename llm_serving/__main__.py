"""Runs the command: ``python -m llm_serving serve`` is ``llm-serving serve``."""

import sys

from llm_serving.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
