"""Runs the program ``llm-serving`` as ``python -m llm_serving``. Both accept the same arguments."""

import sys

from llm_serving.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
