"""Provides common parts of the command-line programs: option types, errors, exit codes and JSON files."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec

import orjson

from llm_serving.errors import LLMServingError

EXIT_FAILURES = 1
"""Exit code: requests failed, or a goal was missed."""
EXIT_NOT_STARTED = 2
"""Exit code: the measurement could not start."""
EXIT_UNSTEADY = 3
"""Exit code of a measurement that proves nothing, because the machine's speed changed during it."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""

Range = tuple[int, int]
"""Smallest and largest length. A length is drawn uniformly from this range, including both ends."""

Arguments = ParamSpec("Arguments")


class LoadTestError(Exception):
    """Base of the errors that end a program before it measures. The message states the cause and the remedy."""


class UsageError(LoadTestError):
    """Raised if an option or a data set is wrong."""


class DisturbedError(LoadTestError):
    """Raised if other programs disturbed a measurement and made its result impossible, for example a rate below 0."""


class ServerUnreachableError(LoadTestError):
    """Raised if no server responds at the address, or if its response does not name a model."""


def exits_with_errors(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorates a program's main function. If it raises an expected error, prints a line and returns the exit code.

    SIGTERM raises SystemExit in ``main``, so its ``with`` and ``finally`` blocks end the servers that it has started.
    """

    @wraps(main)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            with _exits_on_sigterm():
                return main(*args, **kwargs)
        except (LoadTestError, LLMServingError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_NOT_STARTED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return wrapped


@contextmanager
def _exits_on_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def client_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yields threads that send requests. Without an error, waits at the end for all of them.

    After an error or a signal, does not wait, because a server may never respond. The caller then ends its servers,
    which ends the requests.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def parse_counts(text: str) -> tuple[int, ...]:
    """Parses an option such as ``1,8,32``: whole numbers of at least 1."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers above 0, separated by commas")
    return counts


def parse_count(text: str) -> int:
    """Parses one whole number of at least 1."""
    counts = parse_counts(text)
    if len(counts) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one number")
    return counts[0]


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def parse_range(text: str) -> Range:
    """Parses an option ``N`` or ``A:B``: the smallest and largest value of a range, at least 1."""
    try:
        low, _, high = text.partition(":")
        bounds = (int(low), int(high or low))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number or A:B") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 <= A <= B")
    return bounds


def parse_values(text: str) -> tuple[str, tuple[str, ...]]:
    """Parses an option ``KEY=V1,V2``: a setting and its values. A comma inside brackets belongs to a value."""
    key, equals, values = text.partition("=")
    if not key or not equals or not values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=V1,V2")
    return key, tuple(re.split(r",(?![^\[]*\])", values))


def new_parser(
    description: str | None, config: str | None = None, *, starts_servers: bool = False, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with the options that several programs share, such as ``--json``, ``--config`` and ``--set``."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    if config is not None:
        add, repeated = parser.add_argument, "override a setting of the config (can be repeated)"
        add("--config", default=config, help="file name in configs/, or path (default %(default)s)")
        add("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=repeated)
    if starts_servers:
        parser.add_argument("--start-timeout", type=positive, default=600.0, help="maximum seconds to start a server")
    return parser


def write_json(path: Path | None, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes a program's results, and creates the folder. Does nothing if ``path`` is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    path.write_bytes(orjson.dumps(content, option=options))
