"""How the programs end: what they exit with, and errors in a line of text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from llm_serving.errors import LLMServingError
from performance.load.errors import LoadTestError

EXIT_FAILURES = 1
EXIT_NOT_STARTED = 2
EXIT_UNSTEADY = 3
"""What was measured is no evidence: the machine did not hold its speed."""
EXIT_INTERRUPTED = 130

Arguments = ParamSpec("Arguments")


def told_errors(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """The main of a program that tells what kept it from measuring and gives ``EXIT_NOT_STARTED`` then, or
    ``EXIT_INTERRUPTED``."""

    @wraps(main)
    def telling(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except (LoadTestError, LLMServingError) as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_NOT_STARTED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return telling
