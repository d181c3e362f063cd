"""What ends a load test before it starts; the program prints the text and exits with 2."""

from __future__ import annotations


class LoadTestError(Exception):
    """Base: the text says what was wrong and what to do."""


class UsageError(LoadTestError):
    """An option or a data set is wrong."""


class ServerUnreachableError(LoadTestError):
    """No server answers, or not in a way that tells which model to ask."""
