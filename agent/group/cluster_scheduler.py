"""The process through which the agents of a group on Ascends find each other (the scheduler of a MindSpore cluster).

The launcher (``llm_serving/executor/hccl_cluster.py``) starts this process as ``python -m
agent.group.cluster_scheduler``, with the environment of the role ``MS_SCHED``. The process uses no device. It ends when
the launcher ends, or when it is killed.
"""

from __future__ import annotations

import argparse
import logging
import sys

from llm_serving.ipc.bootstrap import BootstrapPipe


def main() -> int:
    """Serves the cluster until all agents have left. Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m agent.group.cluster_scheduler", description=__doc__)
    parser.add_argument("--pipe-fd", type=int, required=True, help="pipe that is closed when the launcher ends")
    BootstrapPipe(parser.parse_args().pipe_fd).exit_when_launcher_goes()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import mindspore
    from mindspore.communication import init

    mindspore.set_device("CPU")
    init()  # in the role MS_SCHED, this returns when every worker has left
    return 0


if __name__ == "__main__":
    sys.exit(main())
