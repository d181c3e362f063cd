"""Measures how long the loss of an agent lasts: ``python tests/long/losses_of_agents.py [--times N]``.

A real server with the embedded model serves 16 streams. Its agent is killed, or stopped with SIGSTOP, several times.
Each line of the output is a JSON object. The object has the fault, the seconds until the server noticed the fault, and
the seconds until a new agent was ready. All requests must complete with the tokens of an undisturbed run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from support.server_process import ServerProcess, running_server  # noqa: E402

NUM_STREAMS = 16
BODY = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def tokens(server: ServerProcess, index: int) -> list[int]:
    answer: dict[str, Any] = server.post("/v1/completions", BODY | {"prompt": [1, 300 + index]}, timeout_s=600.0)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def wait_for(server: ServerProcess, event: str, count: int) -> float:
    """Waits until the log has ``count`` events of this name. Returns the time (``time.monotonic``)."""
    while len(server.events(event)) < count:
        time.sleep(0.005)
    return time.monotonic()


def measure(server: ServerProcess, fault: str, expected: list[list[int]]) -> dict[str, object]:
    num_lost, num_ready = len(server.events("agent_lost")), len(server.events("agent_ready"))
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(tokens, server, index) for index in range(NUM_STREAMS)]
        while server.get("/server_info")["engine"]["running"] < NUM_STREAMS:
            time.sleep(0.005)
        began = time.monotonic()
        server.agents()[0].send_signal(FAULTS[fault])
        noticed = wait_for(server, "agent_lost", num_lost + 1) - began
        ready = wait_for(server, "agent_ready", num_ready + 1) - began
        equal = sum(answer.result() == wanted for answer, wanted in zip(answers, expected, strict=True))
    return {"fault": fault, "noticed_s": round(noticed, 3), "ready_s": round(ready, 3), "equal": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="number of faults of each kind (default: 3)")
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for fault in FAULTS:
            # Each loss has a new server, because the pause before a restart grows with each loss.
            for turn in range(times):
                settings = ["model_config.decode_batch_size=[16]", "pa_config.num_blocks=512"]
                with running_server(Path(folder, f"{fault}{turn}"), settings, forks=False) as server:
                    expected = [tokens(server, index) for index in range(NUM_STREAMS)]
                    lines.append(measure(server, fault, expected))
                    print(json.dumps(lines[-1]), flush=True)
    return 0 if all(line["equal"] == NUM_STREAMS for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
