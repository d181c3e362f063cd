"""The load test's program, from the command line to the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from performance.load.client import LoadRun, run_load
from performance.load.options import LoadOptions, parse_options
from performance.load.progress import progress_display
from performance.load.report import format_report, report_json
from performance.load.statistics import LoadFigures, measure
from performance.program import EXIT_FAILURES, EXIT_INTERRUPTED, LoadTestError, exits_with_errors, write_json


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    _check_writable(options)
    with progress_display() as display:
        run = run_load(options, display)
    figures = measure(run)
    print(format_report(run, figures))
    _write_files(run, figures)
    if run.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if figures.failed else 0


def result_path(options: LoadOptions, suffix: str) -> Path:
    """Returns the path of a result file. The file's name contains the options of the load, so that another load does
    not overwrite the file.
    """
    name = f"serving_performance_X{options.rate:g}_T{options.duration:g}_seed{options.seed}"
    return options.output_dir / f"{name}{suffix}"


def _check_writable(options: LoadOptions) -> None:
    """Creates the folders of the result files before the run, so that an error is reported immediately."""
    folders = [options.output_dir]
    if options.json_path is not None:
        folders.append(options.json_path.parent)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoadTestError(f"cannot create the folder {folder}: {error.strerror}") from error


def _write_files(run: LoadRun, figures: LoadFigures) -> None:
    options = run.options
    content = report_json(run, figures)
    print()
    for path in (result_path(options, ".json"), options.json_path):
        if path is not None:
            write_json(path, content)
            print(f"  {path}")
    if not options.plot or not figures.requests:
        return
    try:
        from performance.load.plot import write_plot
    except ImportError as error:
        print(f"  no picture: {error}")
        return
    plot_path = result_path(options, ".png")
    write_plot(plot_path, run, figures)
    print(f"  {plot_path}")
