"""Tests a large body for which there is no memory. Only its request fails, and the server continues."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.small_configs import REPOSITORY

PROGRAM = """
import resource, sys
import psutil
from llm_serving.server.http.body import _parse
from llm_serving.server.operations.admin import TokenizeRequest

body = b'{"prompt": "' + b"a " * 1_000_000 + b'"}'
_parse(TokenizeRequest, b'{"prompt": "a"}')
allowed = psutil.Process().memory_info().vms + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (allowed, resource.RLIM_INFINITY))
try:
    _parse(TokenizeRequest, body)
    print("parsed")
except MemoryError:
    print("MemoryError")
"""


@pytest.mark.parametrize(
    ("free_mib", "expected"), [(1, "MemoryError"), (6, "MemoryError"), (20, "MemoryError"), (300, "parsed")]
)
def test_the_parser_does_not_end_the_process(free_mib, expected):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(free_mib)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr[-500:]
