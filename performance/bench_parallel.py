#!/usr/bin/env python3
"""Step times of a model on one agent and shared by several: ``python performance/bench_parallel.py [--json FILE]``.

Decode steps through ModelRunner in agents of their own, without a server: the median step, how much of it the agent
that answers spends in sums and gathers, and how much of that waiting for the others. ``--set`` changes the config as
``start_server.py`` does. The greedy texts of ``--texts`` seeded prompts are compared with those of the first group,
which is one agent: how many are the same, and by how much the other tokens lost.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.own_python import use_own_python

use_own_python()

from performance.bench.parallel_main import main

if __name__ == "__main__":
    sys.exit(main())
