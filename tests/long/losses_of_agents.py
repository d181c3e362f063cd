"""Measures how long the loss of an agent lasts: ``python tests/long/losses_of_agents.py [--times N] [--fault killed]``.

A real server with the embedded model serves 16 streams. Its agent is killed, or stopped with SIGSTOP, several times,
when all clients have received tokens. Each line of the output is a JSON object. The object has the fault, the seconds
until the server noticed the fault, the seconds until a new agent was ready, and the number of streams with the right
tokens. The last line of a fault has the longest times and the limits. The exit code is 1 if a limit was exceeded, or if
the tokens and the text of a stream are not exactly those of an undisturbed response. So no token may be lost or
repeated. The limits hold for an idle machine.
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

from support.long_program import run_program  # noqa: E402
from support.server_process import ServerProcess, running_server, stream_events  # noqa: E402

NUM_STREAMS = 16
BODY = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
LIMITS = {"killed": {"noticed_max_s": 0.2, "ready_max_s": 2.5}, "stopped": {"noticed_max_s": 3.0}}
"""Maximum times of each fault, in seconds."""


class Stream:
    """A streamed request. ``received`` grows as the client receives its events."""

    def __init__(self, server: ServerProcess, index: int) -> None:
        self._server = server
        self._body = BODY | {"prompt": [1, 300 + index]}
        self.received = bytearray()

    def run(self) -> None:
        self._server.stream("/v1/completions", self._body, self.received, timeout_s=600.0)

    def is_equal(self, expected: dict[str, Any]) -> bool:
        """Returns whether the events have exactly the tokens and the text of the choice ``expected``."""
        choices = [event["choices"][0] for event in stream_events(self.received) if "choices" in event]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        return tokens == expected["token_ids"] and "".join(choice["text"] for choice in choices) == expected["text"]

    def undisturbed(self) -> dict[str, Any]:
        """Returns the choice of the same request without a stream."""
        answer: dict[str, Any] = self._server.post("/v1/completions", self._body, timeout_s=600.0)
        choice: dict[str, Any] = answer["choices"][0]
        return choice


def wait_for(server: ServerProcess, event: str, count: int) -> float:
    """Waits until the log has ``count`` events of this name. Returns the time (``time.monotonic``)."""
    while len(server.events(event)) < count:
        time.sleep(0.005)
    return time.monotonic()


def measure(server: ServerProcess, fault: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs the streams, injects a fault when all of them have tokens, and waits for their ends. Returns the figures.

    ``cut`` is the number of streams that had only a part of their tokens when the loss was noticed.
    """
    num_lost, num_ready = len(server.events("agent_lost")), len(server.events("agent_ready"))
    [agent] = server.agents()
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [Stream(server, index) for index in range(NUM_STREAMS)]
        ended = [pool.submit(stream.run) for stream in streams]
        while not all(stream.received for stream in streams):
            time.sleep(0.001)
        began = time.monotonic()
        agent.send_signal(FAULTS[fault])
        noticed = wait_for(server, "agent_lost", num_lost + 1) - began
        received = [len(stream.received) for stream in streams]
        ready = wait_for(server, "agent_ready", num_ready + 1) - began
        for each in ended:
            each.result()
    equal = sum(stream.is_equal(wanted) for stream, wanted in zip(streams, expected, strict=True))
    cut = sum(0 < count < len(stream.received) for count, stream in zip(received, streams, strict=True))
    return {"fault": fault, "noticed_s": round(noticed, 3), "ready_s": round(ready, 3), "cut": cut, "equal": equal}


def measure_all(folder: Path, fault: str, times: int) -> bool:
    """Measures a fault ``times`` times and prints the lines. Returns whether all limits were kept, and all streams were
    cut and then completed with the right tokens.

    Each loss has a new server, because the pause before a restart grows with each loss.
    """
    lines = []
    for turn in range(times):
        settings = ["model_config.decode_batch_size=[16]", "pa_config.num_blocks=512"]
        with running_server(folder / f"{fault}{turn}", settings, forks=False) as server:
            expected = [Stream(server, index).undisturbed() for index in range(NUM_STREAMS)]
            lines.append(measure(server, fault, expected))
            print(json.dumps(lines[-1]), flush=True)
    figures = {f"{name}_max_s": max(float(line[f"{name}_s"]) for line in lines) for name in ("noticed", "ready")}
    is_equal = all(line["cut"] == line["equal"] == NUM_STREAMS for line in lines)
    is_good = is_equal and all(figures[name] <= limit for name, limit in LIMITS[fault].items())
    print(json.dumps({"fault": fault, "times": times, **figures, "limits": LIMITS[fault], "pass": is_good}), flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=3, help="number of faults of each kind (default: 3)")
    parser.add_argument("--fault", choices=tuple(FAULTS), help="only faults of this kind")
    arguments = parser.parse_args()
    faults = FAULTS if arguments.fault is None else (arguments.fault,)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = [measure_all(Path(folder), fault, arguments.times) for fault in faults]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(run_program(main))
