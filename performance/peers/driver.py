"""Measures a peer, with the same prompts and definitions as ``bench_engine.py``.

This file uses only the standard library, because it runs in the peer's Python. A driver passes a function to ``main``
that loads the model. ``main`` reads the request, a JSON object, from the command line, and prints a JSON object per
row.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], None]
"""Type of functions that generate a number of greedy tokens for each prompt of token ids, and ignore end tokens."""

MakeGenerate = Callable[[dict[str, Any]], Generate]
"""Type of functions that load the model which a request names. The request also has the largest batch of all its cases
(``max_batch``), and the largest number of tokens of a sequence (``max_tokens``).
"""

FIRST_PLAIN_TOKEN = 10
"""Prompts have tokens from this id on. The smaller ids are special tokens."""
WARM_UP_TOKENS = 4
"""Maximum number of tokens that a sequence generates in the warm-up run."""
MARK = "peer-result "
"""Prefix of the output lines that contain a result. All other lines come from the peer itself."""
FORBIDS_AVX512 = "PEERS_FORBID_AVX512"
"""Environment variable. If it is set, a driver fails if a thread used AVX-512 after the start of ``main``."""
TASKS = Path("/proc/self/task")
TOLERANCE_S = 0.1
"""Maximum error of a thread's time of its last use of AVX-512."""


def main(make_generate: MakeGenerate) -> None:
    """Measures the peer and prints a row per case. The parent process limits the threads by environment variables."""
    started = time.monotonic()
    request = json.loads(sys.argv[1])
    cases = list(_cases(request))
    request["max_batch"] = max(batch for _, batch, _, _ in cases)
    request["max_tokens"] = max(prompt + new for _, _, prompt, new in cases)
    request["max_batch_tokens"] = max(batch * (prompt + new) for _, batch, prompt, new in cases)
    with _locked(request["lock"], fcntl.LOCK_SH):
        generate = make_generate(request)
    for case in cases:
        with _locked(request["lock"], fcntl.LOCK_EX):
            row = _measure(generate, case, request)
        if os.environ.get(FORBIDS_AVX512):
            _check_avx512(time.monotonic() - started)
        print(MARK + json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # does not wait for threads of the peer


def _check_avx512(seconds: float) -> None:
    """Ends the process with an error if a thread used AVX-512 in the last ``seconds``.

    Linux stores the time of a thread's last use when the thread stops running. A new thread starts with the time of the
    thread that created it, so older times prove nothing.
    """
    files = list(TASKS.glob("*/arch_status"))
    if not files:
        sys.exit("this kernel does not report which threads use AVX-512, so the limit cannot be checked")
    for file in files:
        try:
            text = file.read_text()
        except OSError:  # the thread has ended
            continue
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name == "AVX512_elapsed_ms" and 0 <= int(value) < 1000.0 * (seconds - TOLERANCE_S):
                sys.exit(f"a thread used AVX-512 {int(value)} ms ago, but this run is limited to older instructions")


@contextlib.contextmanager
def _locked(path: str | None, kind: int) -> Iterator[None]:
    """Holds the file lock at ``path``, so that no other program disturbs a measurement. Does nothing if ``path`` is
    None.

    A driver takes the exclusive lock while it measures, and the shared lock while it loads the model.
    """
    with contextlib.ExitStack() as owned:
        if path is not None:
            fcntl.flock(owned.enter_context(open(path, "a")), kind)
        yield


def _cases(request: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    for batch in request["batch"]:
        yield "decode", batch, request["prompt"], request["new"]
    for tokens in request["prefill"]:
        yield "prefill", 1, tokens, 1


def _measure(generate: Generate, case: tuple[str, int, int, int], request: dict[str, Any]) -> dict[str, Any]:
    """Runs a case several times and returns the median rates. The decode rate excludes the time to the first token."""
    kind, batch, prompt, new = case
    generate(_prompts(case, request, -1), min(new, WARM_UP_TOKENS))
    runs = []
    for repeat in range(request["repeats"]):
        first = _seconds(generate, _prompts(case, request, 2 * repeat), 1)
        whole = _seconds(generate, _prompts(case, request, 2 * repeat + 1), new) if new > 1 else first
        runs.append(
            {
                "decode_tokens_per_s": batch * (new - 1) / (whole - first) if new > 1 else None,
                "prefill_tokens_per_s": batch * prompt / first,
                "end_to_end_tokens_per_s": batch * new / whole,
                "ttft_ms": 1000.0 * first,
            }
        )
    middle = {
        key: None if value is None else statistics.median(run[key] for run in runs) for key, value in runs[0].items()
    }
    return {"kind": kind, "batch": batch, "prompt": prompt, "new": new, **middle, "repeats": runs}


def _prompts(case: tuple[str, int, int, int], request: dict[str, Any], seed: int) -> list[list[int]]:
    """Returns prompts that are all different, so that a prefix cache finds nothing."""
    kind, batch, prompt, _ = case
    generator = random.Random(f"peer/{kind}/{batch}/{prompt}/{seed}")
    vocab_size = request["vocab_size"]
    return [[generator.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(prompt)] for _ in range(batch)]


def _seconds(generate: Generate, prompts: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    generate(prompts, new)
    return time.perf_counter() - start
