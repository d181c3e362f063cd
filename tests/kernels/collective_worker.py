"""Runs one agent of a pipeline stage in its own process: computes sums and gathers, then prints the results as JSON.

python tests/kernels/collective_worker.py EXCHANGE_NAME LAYOUT_JSON INDEX WHAT TIMEOUT_S BELL

The argument WHAT names the calls to make. If BELL is 1, the agent announces its changes to other machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import numpy as np  # noqa: E402

from agent.kernels import collectives  # noqa: E402
from llm_serving.errors import GroupDownError  # noqa: E402
from llm_serving.ipc.exchange import COLLECTIVE_BYTES, DOWN_WORD, ExchangeLayout, ExchangeMemory  # noqa: E402
from support.collective_values import DTYPES, SIZES, contribution  # noqa: E402


def open_stage(memory: ExchangeMemory, index: int, timeout_s: float, *, bell: bool) -> None:
    layout = memory.layout
    base = int(np.frombuffer(memory.mapping, np.uint8).ctypes.data)
    collectives.open_exchange(
        base,
        down=4 * DOWN_WORD,
        lines=layout.collective_line(0),
        buffers=layout.collective_buffers,
        piece_bytes=COLLECTIVE_BYTES,
        timeout_s=timeout_s,
        size=layout.tensor_parallel,
        index=index,
        bell=layout.bell_line if bell else 0,
    )


def run_sums(index: int, size: int) -> dict[str, Any]:
    results = {}
    for dtype in DTYPES:
        for count in SIZES:
            out = collectives.all_reduce(contribution(index, dtype, count), dtype)
            results[f"{dtype} {count}"] = hashlib.sha256(out.tobytes()).hexdigest()
    return results


def run_gathers(index: int, size: int) -> dict[str, Any]:
    results = {}
    for count in (1, 100, 300_001):
        out = collectives.all_gather(contribution(index, "float32", count), size)
        results[f"all {count}"] = hashlib.sha256(out.tobytes()).hexdigest()
    # Gathers the columns of each agent's rows to the first agent. The last agent has fewer columns. The rows are sent
    # in pieces, which end within a row or between rows.
    for rows, stride, whole in ((1, 5, 5 * size - 2), (300, 1000, 1000 * size - 300), (3, 200_000, 200_000 * size - 1)):
        logits = np.arange(rows * whole, dtype=np.float32).reshape(rows, whole)
        own = logits[:, index * stride : (index + 1) * stride]
        out = np.full((rows, whole), -1.0, np.float32) if index == 0 else None
        if out is not None:
            out[:, : own.shape[1]] = own
            collectives.gather_rows_to_first(out[:, : own.shape[1]], out, stride, whole)
        else:
            collectives.gather_rows_to_first(np.ascontiguousarray(own), None, stride, whole)
        results[f"rows {rows} {stride}"] = None if out is None else bool((out == logits).all())
    return results


def run_race(index: int, size: int) -> dict[str, Any]:
    """Makes thousands of sums and gathers with random pauses. No call may get the numbers of another call."""
    generator = np.random.default_rng(index)
    for call in range(4000):
        if generator.integers(0, 40) == 0:
            time.sleep(float(generator.random()) * 0.002)
        count = 1 + call % 97
        if call % 3 == 2:
            rows = np.full((2, 4), 100 * call + index, np.float32)
            out = np.zeros((2, 4 * size), np.float32)
            collectives.gather_rows_to_first(rows, out if index == 0 else None, 4, 4 * size)
            expected = np.repeat([100 * call + other for other in range(size)], 4)
            if index == 0 and not (out[:, 4:] == expected[4:]).all():
                return {"wrong": call}
        else:
            total = collectives.all_reduce(np.full(count, call + index, np.float32), "float32")
            if not (total == sum(call + other for other in range(size))).all():
                return {"wrong": call}
    return {"wrong": None}


def run_lonely(index: int, size: int) -> dict[str, Any]:
    """Calls a sum that no other agent joins.

    Returns its error, and the elapsed time and processor time until the error.
    """
    start, before = time.monotonic(), time.process_time()
    try:
        collectives.all_reduce(np.zeros(4, np.float32), "float32")
    except GroupDownError as error:
        return {
            "error": str(error),
            "seconds": time.monotonic() - start,
            "processor_seconds": time.process_time() - before,
        }
    return {}


def main() -> None:
    name, layout, index, what, timeout_s, bell = sys.argv[1:]
    memory = ExchangeMemory.attach(name, ExchangeLayout(**json.loads(layout)))
    open_stage(memory, int(index), float(timeout_s), bell=bell == "1")
    print("open", flush=True)
    result = globals()[f"run_{what}"](int(index), memory.layout.tensor_parallel)
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
