"""Measures how long two agents take to add their arrays over shared memory (all-reduce).

If the machine has at least two cores, each process runs on its own core. For comparison, the processes pass a single
word of shared memory back and forth. An all-reduce cannot be faster than the transfer of this word. The result has the
median and the 99th percentile of the time for each array size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from agent.kernels import collectives
from agent.weights.storage import STORAGE_DTYPES
from llm_serving.ipc.exchange import COLLECTIVE_BYTES, DOWN_WORD, ExchangeLayout, ExchangeMemory
from performance.kernels.collective_calls import measure_all_reduce, measure_ping_pong
from performance.program import new_parser, write_json
from performance.terminal import format_table

ROOT = Path(__file__).resolve().parents[2]
SIZES = (256, 4096, 65_536, 1_048_576)
CALLS = {256: 20_000, 4096: 20_000, 65_536: 5_000, 1_048_576: 500}
TURNS = 50_000
"""Number of times that the two processes pass the word of shared memory back and forth."""
WARM_CALLS = 200
"""Number of first calls that are not measured."""
LAYOUT = ExchangeLayout(2, 1, hidden_size=64, max_tokens=1, max_rows=1)


def main() -> int:
    """Prints the times of all-reduces and optionally writes them to a file. Returns the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--agent", nargs=2, metavar=("EXCHANGE", "INDEX"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent is not None:
        print(json.dumps(run_agent(arguments.agent[0], int(arguments.agent[1]), arguments.dtype)), flush=True)
        os._exit(0)
    figures = measure(arguments.dtype)
    print(table(figures))
    write_json(arguments.json, figures)
    return 0


def measure(dtype: str) -> dict[str, Any]:
    """Starts two processes that add arrays, and returns the times. An all-reduce takes the time of the slower process.
    """
    memory = ExchangeMemory.create(LAYOUT)
    agents = []
    try:
        for index in (0, 1):
            command = [sys.executable, str(ROOT / "performance" / "bench_collectives.py"), "--dtype", dtype]
            command += ["--agent", memory.name, str(index)]
            agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        memory.close()
        for agent in agents:
            agent.kill()
            agent.wait()
    first, second = (json.loads(output) for output in outputs)
    one_way = first["turn_ns"] / 2000
    sizes = {}
    for size in SIZES:
        slower = max(first["sums"][str(size)], second["sums"][str(size)], key=lambda each: float(each["median_us"]))
        sizes[str(size)] = {**slower, "times_one_way": slower["median_us"] / one_way}
    return {"dtype": dtype, "one_way_us": one_way, "sums": sizes}


def run_agent(name: str, index: int, dtype: str) -> dict[str, Any]:
    """Runs the benchmark in process ``index`` (0 or 1). Measures all-reduces, and round
    trips of a 32-bit word between the processes.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[index]})
    memory = ExchangeMemory.attach(name, LAYOUT)
    base = int(np.frombuffer(memory.mapping, np.uint8).ctypes.data)
    collectives.open_exchange(
        base,
        down=4 * DOWN_WORD,
        lines=LAYOUT.collective_line(0),
        buffers=LAYOUT.collective_buffers,
        piece_bytes=COLLECTIVE_BYTES,
        timeout_s=60.0,
        size=2,
        index=index,
    )
    collectives.all_reduce(np.zeros(1, np.float32), "float32")  # returns after the other process has started
    lines = [base + LAYOUT.arrival_line(each) for each in (0, 1)]
    turns = measure_ping_pong(lines[index], lines[1 - index], TURNS, serves=index == 0)
    sums = {}
    for size in SIZES:
        array = np.ones(size // np.dtype(STORAGE_DTYPES[dtype]).itemsize, STORAGE_DTYPES[dtype])
        times = measure_all_reduce(array, dtype, CALLS[size] + WARM_CALLS)[WARM_CALLS:]
        sums[str(size)] = {
            "median_us": float(np.median(times)) / 1000,
            "p99_us": float(np.percentile(times, 99)) / 1000,
        }
    return {"turn_ns": float(np.median(turns)), "sums": sums}


def table(figures: dict[str, Any]) -> str:
    """Returns the times of all-reduces as a table."""
    rows = []
    for size, each in figures["sums"].items():
        rows.append([size, f"{each['median_us']:.2f}", f"{each['p99_us']:.2f}", f"{each['times_one_way']:.1f}"])
    one_way = f"transfer of a word between processes: {figures['one_way_us']:.2f} us (half of a round trip)"
    header = ["bytes", "median us", "p99 us", "times one way"]
    return f"{one_way}\nsums of {figures['dtype']}:\n{format_table(header, rows)}"
