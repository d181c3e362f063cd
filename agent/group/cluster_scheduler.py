"""The scheduler of a group's MindSpore cluster: lets the agents of a group on Ascends find each other, nothing else.

Started by the launcher (``llm_serving/executor/hccl_cluster.py``) as ``python -m agent.group.cluster_scheduler`` with
the
environment of the role ``MS_SCHED``; it touches no device. It ends with the launcher, or when it is killed.
"""

from __future__ import annotations

import argparse
import logging
import sys

from llm_serving.ipc.bootstrap import BootstrapPipe


def main() -> int:
    """Serve the cluster until its agents have gone. Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m agent.group.cluster_scheduler", description=__doc__)
    parser.add_argument("--pipe-fd", type=int, required=True, help="pipe whose end says that the launcher is gone")
    BootstrapPipe(parser.parse_args().pipe_fd).exit_when_launcher_goes()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import mindspore
    from mindspore.communication import init

    mindspore.set_device("CPU")
    init()  # of the role MS_SCHED: returns when every worker has gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
