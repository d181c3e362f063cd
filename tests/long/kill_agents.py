"""Kills agents of a parallel deployment under load, repeatedly, and reports how its groups recovered.

    python tests/long/kill_agents.py --kills 20 [--set parallel_config.tensor_parallel=2 ...]

Each kill sends SIGKILL to the next rank, while clients request texts with known tokens. One line for each kill shows
when it was noticed, when the group served again, and how long the pause before the restart was. The pause before a
restart grows with each loss.

The exit code is 1 in three cases:

- An answer was neither the expected tokens nor a clear error.
- A group needed longer than its pause plus three times the first start.
- A process, port or segment of shared memory was left.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.agent_kills import Kill, Load, engine_of, kill_agent  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import ServerProcess, running_server  # noqa: E402

START_FACTOR = 3.0
"""Maximum time of a start under load, as a multiple of the first start."""


def main() -> int:
    """Runs the program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--config", default="llama_tiny_cpu.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parsed = parser.parse_args()
    overrides = parsed.overrides or ["parallel_config.tensor_parallel=2"]
    limit = f"serving_config.agent_restart_limit={parsed.kills}"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_agents_") as folder:
        with running_server(Path(folder), [*overrides, limit], parsed.config, forks=False) as server:
            start_s = time.monotonic() - began
            agents = engine_of(server)["agents"]
            print(f"{len(agents)} agents ready in {start_s:.1f} s; {' '.join(overrides)}")
            load, kills = run(server, len(agents), parsed.kills)
            server.wait_until_idle()
        open_ports = [agent["address"] for agent in agents if is_open(agent["address"])]
    late = [kill for kill in kills if kill.start_s > START_FACTOR * start_s]
    print(f"{load.answered} requests answered with their tokens, {len(load.failed)} ended with an error")
    for text in [*dict.fromkeys(load.failed), *load.wrong, *map(str, late), *open_ports]:
        print(f"  {text}")
    slowest = max(kill.start_s for kill in kills)
    print(f"noticed within {max(kill.noticed_s for kill in kills):.3f} s; back within {slowest:.1f} s and the pause")
    is_good = not (load.wrong or late or open_ports) and len(kills) == parsed.kills and load.answered > 0
    print("nothing was left: no process, port or shared memory" if is_good else "FAILED")
    return 0 if is_good else 1


def run(server: ServerProcess, num_agents: int, num_kills: int) -> tuple[Load, list[Kill]]:
    """Kills the ranks in order while the load runs."""
    kills = []
    restarts: dict[int, int] = {}
    group_size = num_agents // len({agent["replica"] for agent in engine_of(server)["agents"]})
    with Load(server) as load:
        for number in range(num_kills):
            load.wait_for_more()
            rank = number % num_agents
            replica = rank // group_size
            kill = kill_agent(server, rank, restarts.get(replica, 0))
            restarts[replica] = restarts.get(replica, 0) + 1
            kills.append(kill)
            print(
                f"kill {number + 1:3}: agent {rank}, noticed after {kill.noticed_s:.3f} s, serving after "
                f"{kill.ready_s:5.2f} s (pause {kill.backoff_s:5.2f} s); {load.answered} answered",
                flush=True,
            )
    return load, kills


def is_open(address: str) -> bool:
    """Returns True if a process listens at the address."""
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


if __name__ == "__main__":
    sys.exit(run_program(main))
