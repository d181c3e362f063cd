"""Defines the command line of ``tools/replay.py`` and runs its commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llm_serving.errors import LLMServingError
from llm_serving.flight.format import FlightRecordingError, replica_folders
from llm_serving.flight.reader import Stretch, read_recording
from llm_serving.flight.timeline import build_timeline
from performance.program import UsageError
from tools.replaying.describe import shorten
from tools.replaying.figures import comparison_table, figures_of
from tools.replaying.html import timeline_html
from tools.replaying.replayer import Difference, replay
from tools.replaying.trace import chrome_trace
from tools.replaying.what_if import changed_limits, fit_device, what_if

__all__ = ["main"]

EXIT_DIFFERENT, EXIT_USAGE = 1, 2
EPILOG = """\
exit code: 0 if every decision equals the recorded one (with --policy or --set: if the run succeeded),
1 if a decision differs, 2 if the recording cannot be read or replayed, or if an option is wrong

examples:
  %(prog)s output/flight
  %(prog)s output/flight --html timeline.html
  %(prog)s output/flight --policy chunked --set num_blocks=512
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    changes = [*options.set, *([f"policy={options.policy}"] if options.policy else [])]
    try:
        replicas = replica_folders(options.recording)
        if replicas and not (changes or options.html or options.trace):
            return max(_replay_replica(folder, options) for folder in replicas)
        if replicas:
            raise UsageError(f"{options.recording} has the recordings of several replicas: choose one, {replicas[0]}")
        stretches = _chosen(read_recording(options.recording), all_runs=options.all)
        if changes:
            shown = _what_if(stretches[-1], changes)
            code = 0
        else:
            shown = stretches[-1]
            code = _replay_all(stretches)
        _draw(shown, options)
    except (LLMServingError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"error: {error.filename or options.recording}: {error.strerror or error}", file=sys.stderr)
        return EXIT_USAGE
    return code


def _replay_replica(folder: Path, options: argparse.Namespace) -> int:
    print(f"{folder.name}:")
    return _replay_all(_chosen(read_recording(folder), all_runs=options.all))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Runs a flight recording again through the scheduler and compares every decision.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recording", type=Path, help="a folder of segments, one segment, or a folder with one recording per replica"
    )
    parser.add_argument("--policy", help="serve the recorded requests again under another policy")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="serve the recorded requests again with another limit, e.g. num_blocks=512; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="replay every run in the folder, not only the last one")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a timeline as a web page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or Perfetto")
    return parser


def _chosen(stretches: list[Stretch], *, all_runs: bool) -> list[Stretch]:
    last = stretches[-1].header.run
    return stretches if all_runs else [stretch for stretch in stretches if stretch.header.run == last]


def _replay_all(stretches: list[Stretch]) -> int:
    num_steps, code, failures = 0, 0, []
    for stretch in stretches:
        try:
            result = replay(stretch)
        except FlightRecordingError as error:
            failures.append(str(error))
            continue
        for note in result.notes:
            print(f"note: {note}")
        num_steps += result.num_steps
        if result.difference is not None:
            print(_difference_text(result.difference, stretch))
            code = EXIT_DIFFERENT
    if len(failures) == len(stretches):
        raise FlightRecordingError("; ".join(failures))
    for failure in failures:
        print(f"note: a stretch was not replayed: {failure}")
    if code == 0:
        print(f"identical, {num_steps} steps")
    return code


def _difference_text(difference: Difference, stretch: Stretch) -> str:
    """Describes the first difference between a recording and its replay as text."""
    lines = [
        f"different after {difference.num_steps} equal steps (run {stretch.header.run}), in {difference.call}:",
        f"  {difference.field}",
        f"    recorded  {shorten(difference.recorded)}",
        f"    replayed  {shorten(difference.replayed)}",
        f"  at  {difference.event.strip()}",
        "  before:",
        *(f"    {line}" for line in difference.before),
    ]
    return "\n".join(lines)


def _what_if(stretch: Stretch, changes: list[str]) -> Stretch:
    """Simulates the recorded requests twice: with the recorded and with changed limits. Prints and compares both.

    The difference between the recording and the first simulation shows how exact the model of the device is.
    """
    limits = changed_limits(stretch.header.limits, changes)
    model = fit_device(stretch)
    again = what_if(stretch, changed_limits(stretch.header.limits, []), model)
    changed = what_if(stretch, limits, model)
    columns = [("recorded", stretch), ("simulated", again), (", ".join(changes), changed)]
    print(comparison_table([(name, figures_of(each)) for name, each in columns]))
    fit = model.fit.provenance
    print(
        f"\nstep times come from a fit to {fit['steps']} recorded steps (median error {fit['median_error']:.1%});"
        " 'simulated' is the recorded configuration under this model"
    )
    under_way = len(stretch.header.numbers)
    if under_way:
        print(f"{under_way} requests had started before the recording; the simulated runs do not contain them")
    return changed


def _draw(stretch: Stretch, options: argparse.Namespace) -> None:
    if options.html is None and options.trace is None:
        return
    timeline = build_timeline(stretch)
    if options.html is not None:
        options.html.write_text(timeline_html(timeline, stretch, str(options.recording)), encoding="utf-8")
        print(f"wrote {options.html}")
    if options.trace is not None:
        options.trace.write_bytes(chrome_trace(timeline))
        print(f"wrote {options.trace}")
