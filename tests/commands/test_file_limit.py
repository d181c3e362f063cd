"""Tests the limit of open files of a server."""

from __future__ import annotations

import resource

from llm_serving.launcher import _raise_file_limit


def test_the_server_raises_its_limit_of_open_files() -> None:
    """Each connection needs a file, and the usual limit of 1,024 is less than ``serving_config.max_connections``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        _raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
