"""``python -m llm_serving.agent_host``, which ``llm-serving cluster host`` also runs."""

import sys

from llm_serving.agent_host.main import main

if __name__ == "__main__":
    sys.exit(main())
