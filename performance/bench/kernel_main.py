"""Measures each kernel and compares it with the limits of this machine, which are measured in the same run.

A row is the median of the passes that fit into --seconds, at least five. A pass runs a kernel over all copies of its
weights or caches, which together exceed the last-level cache. "ceiling" is the minimum time divided by the measured
time. The minimum time is the longer of two times: to read the data once, and to do the arithmetic. Data is read at full
bandwidth, and the arithmetic has the peak rate of its number format (performance/bench/roofline.py). "bound" names the
longer time. Norms, SwiGLU and sampling read data that is still in the caches, so they can exceed 100 % of the memory
bandwidth.

--against PATH names another build of the kernels: another tree, or its libllm_kernels_testing.so. Passes of both builds
alternate on the same arrays, so that changes in the speed of the machine affect both. "ratio" is the other build's time
divided by this build's time, for linear layers and attention. The ratio is the median over the passes. If the ratio is
above 1, this build is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agent.kernels import kernel_isa
from performance.bench.ceilings import Ceilings, drift_text, measure_ceilings
from performance.bench.kernel_cases import (
    LINEAR_FORMATS,
    LINEAR_ROWS,
    SHAPE_NAMES,
    Case,
    attention_cases,
    linear_cases,
    row_cases,
    sampler_cases,
)
from performance.kernels.library import set_threads
from performance.program import new_parser, parse_counts, write_json

MIN_PASSES = 5
"""Minimum number of measured passes for each case. A pass calls the kernel once with each copy of its data."""
ATTENTION_KERNELS = ("attention decode", "attention prefill", "attention chunk")
HEADER = " ".join(
    [
        *(f"{'kernel':<18}", f"{'shape':<40}", f"{'format':<16}", f"{'thr':>3}", f"{'us':>10}"),
        *(f"{'GB/s':>7}", f"{'GOP/s':>7}", f"{'ceiling':>7}", f"{'bound':<7}"),
    ]
)


@dataclass(frozen=True, slots=True)
class Row:
    kernel: str
    shape: str
    format: str
    threads: int
    seconds: float
    gb_s: float
    gop_s: float
    share_of_ceiling: float
    bound: str
    ratio: float | None = None
    """The other build's time divided by this build's time, or None without another build."""

    def text(self) -> str:
        line = (
            f"{self.kernel:<18} {self.shape:<40} {self.format:<16} {self.threads:>3} {self.seconds * 1e6:>10.1f} "
            f"{self.gb_s:>7.2f} {self.gop_s:>7.1f} {self.share_of_ceiling:>7.0%} {self.bound:<7}"
        )
        return (line if self.ratio is None else f"{line} {self.ratio:>6.2f}").rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = build_parser().parse_args(arguments)
    other: ctypes.CDLL | None = parsed.against
    ceilings, rows = {}, []
    for threads in parsed.threads:
        ceilings[threads] = measure_ceilings(threads)
        print(f"{ceilings[threads].text()}\n{HEADER}{'' if other is None else '  ratio'}".rstrip(), flush=True)
        set_threads(threads)
        if other is not None:
            other.llmk_set_threads(ctypes.c_int(threads))
        for case in cases_of(parsed):
            if parsed.only in case.kernel:
                rows.append(measured(case, parsed.seconds, ceilings[threads]))
                print(rows[-1].text(), flush=True)
        if (warning := drift_text(ceilings[threads], measure_ceilings(threads))) is not None:
            print(warning)
    result = {
        "isa": kernel_isa(),
        "ceilings": asdict(ceilings[parsed.threads[-1]]),
        "ceilings_by_threads": {str(each.threads): asdict(each) for each in ceilings.values()},
        "rows": [asdict(row) for row in rows],
    }
    write_json(parsed.json, result)
    if parsed.png is not None:
        from performance.bench.plots import plot_kernels

        plot_kernels(parsed.png, result)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a roofline plot to this file")
    parser.add_argument("--against", type=kernel_library, metavar="PATH", help="alternate with another build or tree")
    parser.add_argument("--threads", type=parse_threads, default=(0,), help="such as 1,2 (default 0: all processors)")
    parser.add_argument("--seconds", type=float, default=0.1, help="time per row (default %(default)s)")
    parser.add_argument("--only", default="", help="only kernels whose name contains this, such as linear or attention")
    parser.add_argument("--models", type=names_out_of(SHAPE_NAMES), default=SHAPE_NAMES, help=",".join(SHAPE_NAMES))
    parser.add_argument("--rows", type=parse_counts, default=LINEAR_ROWS, help="of linear layers (default 1,8,64,512)")
    parser.add_argument(
        "--formats", type=names_out_of(LINEAR_FORMATS), default=LINEAR_FORMATS, help=",".join(LINEAR_FORMATS)
    )
    return parser


def kernel_library(text: str) -> ctypes.CDLL:
    """Loads another build of the kernels into this process, in addition to the build of this source tree."""
    path = Path(text)
    if path.is_dir():
        tree, path = path, path / "performance" / "kernels" / "libllm_kernels_testing.so"
        if not path.is_file():  # older source trees have no testing library
            path = tree / "agent" / "kernels" / "libllm_kernels.so"
    path = path.resolve()
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL)
        for entry in ("llmk_set_threads", "llmk_test_linear", "RotaryAttention"):
            getattr(library, entry)
    except (OSError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: no build of the kernels, nor a tree with one: {error}") from error
    return library


def parse_threads(text: str) -> tuple[int, ...]:
    return (0,) if text == "0" else parse_counts(text)


def names_out_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns a function that parses comma-separated names. Each name must be one of ``known``."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
        return names

    return parse


def cases_of(parsed: argparse.Namespace) -> Iterator[Case]:
    """Yields cases of the kernels that --only selects. Other cases are not created, because their weights are large."""

    def wanted(*kernels: str) -> bool:
        return any(parsed.only in kernel for kernel in kernels)

    if wanted("linear"):
        yield from linear_cases(parsed.models, parsed.rows, parsed.formats, parsed.against)
    if wanted(*ATTENTION_KERNELS):
        yield from attention_cases(parsed.models, parsed.against)
    yield from row_cases()
    yield from sampler_cases()


def measured(case: Case, seconds: float, ceilings: Ceilings) -> Row:
    """Measures a case and returns its row, with the ratio to another build of the kernels if there is one."""
    if not case.others:
        return row_of(case, median_call_seconds(case.calls, seconds), ceilings)
    own, others = alternating_passes([case.calls, case.others], seconds)
    row = row_of(case, statistics.median(own), ceilings)
    return replace(row, ratio=statistics.median(theirs / ours for theirs, ours in zip(others, own, strict=True)))


def median_call_seconds(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Passes through all calls repeatedly for ``seconds``, and returns the median time of a call."""
    return statistics.median(alternating_passes([calls], seconds)[0])


def alternating_passes(each: Sequence[Sequence[Callable[[], object]]], seconds: float) -> list[list[float]]:
    """Measures each build in passes, which alternate between the builds. A pass runs all calls of a build once.
    Returns, for each build, the seconds per call in each pass.

    ``each`` has the calls of one or two builds of the kernels. Each build first runs a pass that is not measured, and
    then runs for ``seconds``.
    """
    for calls in each:
        _pass_seconds(calls)
    passes: list[list[float]] = [[] for _ in each]
    end = time.perf_counter() + seconds * len(each)
    while len(passes[0]) < MIN_PASSES or time.perf_counter() < end:
        for calls, own in zip(each, passes, strict=True):
            own.append(_pass_seconds(calls))
    return passes


def _pass_seconds(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def row_of(case: Case, seconds: float, ceilings: Ceilings) -> Row:
    operator = case.operator
    return Row(
        kernel=case.kernel,
        shape=case.shape,
        format=case.format,
        threads=ceilings.threads,
        seconds=seconds,
        gb_s=operator.num_bytes / seconds * 1e-9,
        gop_s=operator.operations / seconds * 1e-9,
        share_of_ceiling=operator.seconds(ceilings) / seconds,
        bound=operator.bound(ceilings),
    )
