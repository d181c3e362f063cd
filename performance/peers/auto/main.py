"""Sets up the peers, measures all programs in rounds, and prints ratios: ``performance/compare_peers.py --auto``.

The model is SmolLM2-135M-Instruct, from the GGUF file in the Python package of the default model. The folder that
--folder names keeps the environments of the peers and the converted models, so only the first run downloads and
converts (about 5 GB). A round runs each program once, and each round has another order. The speed of a machine changes
over minutes, so a ratio compares runs of the same round.

With --isa avx2, all programs run as on a processor without newer instructions. llama.cpp is built for this instruction
set in a second environment. A peer fails if one of its threads uses AVX-512. A peer that this machine cannot limit is
left out, and the program prints the reason.

A run with the default options in a source tree, in which no program failed, replaces the README's picture. Any other
run writes its picture into the folder, also if LLM_KERNELS_ISA limits this server. The program prints the path.

examples:
  compare_peers.py --auto
  compare_peers.py --auto --peers llama_cpp --batch 1,8 --rounds 5 --json results.json
  compare_peers.py --auto --isa avx2
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from llm_serving.cli import DEFAULT_CONFIG
from llm_serving.config import load_config
from llm_serving.gguf.place import find_gguf
from llm_serving.hub.fetching import cached_draft
from performance.peers.auto.environments import environment_python
from performance.peers.auto.instruction_sets import (
    LIMITS,
    environment_variables,
    limited_environment,
    reason_left_out,
)
from performance.peers.auto.model_files import model_path
from performance.peers.auto.picture import numbers_path, write_picture
from performance.peers.auto.programs import KINDS, PROGRAMS, Program, chosen_programs
from performance.peers.auto.results import comparisons, table
from performance.peers.compare import Peer
from performance.peers.same_file import Rates, measure_ours, measure_theirs
from performance.program import (
    EXIT_FAILURES,
    DisturbedError,
    LoadTestError,
    UsageError,
    exits_with_errors,
    new_parser,
    parse_count,
    parse_counts,
    write_json,
)

ROOT = Path(__file__).resolve().parents[3]
PICTURE = ROOT / "docs" / "pictures" / "peers.svg"
"""The picture of the README."""
PICTURED = ("config", "settings", "peers", "isa", "batch", "prompt", "new", "prefill", "rounds", "threads")
"""Options that must have their default values for a run that replaces ``PICTURE``."""


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison. Returns 0, or 1 if a peer failed; the other programs are measured nevertheless."""
    parsed = build_parser().parse_args(arguments)
    for picture in picture_paths(parsed):
        if parsed.json is not None and numbers_path(picture).resolve() == parsed.json.resolve():
            raise UsageError(f"the picture's numbers are in {parsed.json}; choose another file for --json")
        if parsed.isa is not None and numbers_path(picture).resolve() == numbers_path(PICTURE):
            raise UsageError("the README's picture has no limit of --isa; choose another file for --svg")
    parsed.folder = parsed.folder.resolve()
    with environment_variables(limited_environment(parsed.isa, "ours", parsed.folder)):
        return _compare(parsed)


def _compare(parsed: argparse.Namespace) -> int:
    """Measures all programs and prints the results. Returns the exit code."""
    config = load_config(parsed.config, parsed.settings, fetch=cached_draft)
    path = config.model_config.model_path
    file = None if path is None else find_gguf(Path(path))
    if file is None:
        raise UsageError(f"{config.file} has no GGUF file, which the peers need")
    parsed.vocab_size = config.shape.vocab_size
    left_out = _left_out(parsed)
    chosen = chosen_programs(tuple(kind for kind in parsed.peers if kind not in left_out))
    programs, failures = _prepared(chosen, file, parsed)
    rounds: list[dict[str, Rates]] = []
    for number in range(parsed.rounds):
        measured, failed = _round(number, programs, parsed)
        rounds.append(measured)
        failures |= failed
        head = {"file": file.name, "threads": parsed.threads, "isa": parsed.isa, "left_out": left_out}
        write_json(parsed.json, {**head, "rounds": rounds})
    print(table(rounds, list(programs), parsed.isa))
    precisions = {program.precision for program in chosen}
    compared = comparisons(rounds, [each for each in PROGRAMS if each.precision in precisions])
    picture = picture_paths(parsed)[-1 if failures else 0]
    write_picture(picture, compared, parsed.isa)
    print(f"\npicture: {picture}\nits numbers: {numbers_path(picture)}")
    for name in sorted(failures):
        print(f"no result, or not in all rounds: {name}", file=sys.stderr)
    return EXIT_FAILURES if failures else 0


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, DEFAULT_CONFIG)
    parser.add_argument("--auto", action="store_true", help="selects this program")
    parser.add_argument("--peers", type=parse_kinds, default=KINDS, help=f"default {','.join(KINDS)}")
    isa = "limit all programs to this instruction set (default: no limit)"
    parser.add_argument("--isa", choices=tuple(LIMITS), help=isa)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="default build/peers")
    parser.add_argument("--batch", type=parse_counts, default=(1, 8, 32, 64), help="default 1,8,32,64")
    parser.add_argument("--prompt", type=parse_count, default=64, help="default %(default)s")
    parser.add_argument("--new", type=parse_count, default=64, help="default %(default)s")
    parser.add_argument("--prefill", type=parse_counts, default=(1024,), help="default 1024")
    parser.add_argument("--rounds", type=parse_count, default=3, help="runs of each program (default %(default)s)")
    parser.add_argument("--threads", type=parse_count, default=2, help="of each program (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a peer in a round (%(default)s)")
    picture = "the picture; its numbers are beside it as .json (default: see above)"
    parser.add_argument("--svg", type=Path, metavar="FILE", help=picture)
    return parser


def picture_paths(parsed: argparse.Namespace) -> tuple[Path, ...]:
    """Returns the path of the picture for a run without failures, and then that for a run with failures."""
    if parsed.svg is not None:
        return (parsed.svg,)
    defaults = build_parser().parse_args([])
    is_complete = all(getattr(parsed, name) == getattr(defaults, name) for name in PICTURED)
    is_complete = is_complete and not os.environ.get("LLM_KERNELS_ISA")
    limit = "" if parsed.isa is None else f"_{parsed.isa}"
    of_folder = parsed.folder / f"{PICTURE.stem}{limit}{PICTURE.suffix}"
    return (PICTURE, of_folder) if is_complete and PICTURE.parent.is_dir() else (of_folder,)


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parses names of peers, separated by commas."""
    kinds = tuple(text.split(","))
    if not set(kinds) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(KINDS)}")
    return kinds


def _left_out(parsed: argparse.Namespace) -> dict[str, str]:
    """Prints which peers cannot be limited to --isa, and returns the reasons. Raises UsageError if no peer remains."""
    reasons = {kind: reason for kind in parsed.peers if (reason := reason_left_out(parsed.isa, kind)) is not None}
    for kind, reason in reasons.items():
        print(f"left out: {kind}: {reason}", file=sys.stderr, flush=True)
    if len(reasons) == len(parsed.peers):
        raise UsageError(f"--isa {parsed.isa}: no peer can be limited to it here")
    return reasons


def _prepared(
    programs: Sequence[Program], file: Path, parsed: argparse.Namespace
) -> tuple[dict[Program, Peer], set[str]]:
    """Creates the environments and models of the programs.

    Returns the Python and the model of each program, and the names of programs whose preparation failed.
    """
    parsed.folder.mkdir(parents=True, exist_ok=True)

    @cache
    def python_of(kind: str) -> Path:
        return environment_python(parsed.folder, kind, parsed.isa)

    ready: dict[Program, Peer] = {}
    failures: set[str] = set()
    for program in programs:
        with _reported(program.name, failures):
            ready[program] = _peer(program, file, parsed, python_of)
    return ready, failures


def _peer(program: Program, file: Path, parsed: argparse.Namespace, python_of: Callable[[str], Path]) -> Peer:
    model = model_path(parsed.folder, program.model, file, python_of)
    python = sys.executable if program.kind == "ours" else python_of(program.kind)
    environment = limited_environment(parsed.isa, program.kind, parsed.folder)
    return Peer(program.name, program.kind, str(python), str(model), environment)


def _round(
    number: int, programs: dict[Program, Peer], parsed: argparse.Namespace
) -> tuple[dict[str, Rates], set[str]]:
    """Measures each program once. Returns the rates by program, and the names of programs that failed."""
    order = list(programs)
    order = order[number % len(order) :] + order[: number % len(order)]
    rates: dict[str, Rates] = {}
    failures: set[str] = set()
    for program in order if number % 2 == 0 else reversed(order):
        print(f"round {number + 1}/{parsed.rounds}: {program.name}", file=sys.stderr, flush=True)
        with _reported(program.name, failures):
            rates[program.name] = _measured(program, programs[program], parsed)
    return rates, failures


def _measured(program: Program, peer: Peer, parsed: argparse.Namespace) -> Rates:
    """Measures a program. If other programs disturbed the run, measures it once more, so that the round is complete."""
    if program.kind == "ours":
        return measure_ours([f"model_config.model_path={peer.model}", *program.settings, *parsed.settings], parsed)
    try:
        return measure_theirs(peer, parsed)
    except DisturbedError as error:
        print(f"measured again: {error}", file=sys.stderr, flush=True)
        return measure_theirs(peer, parsed)


@contextlib.contextmanager
def _reported(name: str, failures: set[str]) -> Iterator[None]:
    """Prints an error of the ``with`` block and adds ``name`` to ``failures``, so that the comparison continues."""
    try:
        yield
    except LoadTestError as error:
        print(f"error: {name}: {error}", file=sys.stderr)
        failures.add(name)
