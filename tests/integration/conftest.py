"""Shares one server with default settings between the tests that need no special settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server_process import ServerProcess, running_server

ROOMY = [
    "pa_config.num_blocks=2048",
    "model_config.decode_batch_size=[24]",
    "scheduler_config.prefix_cache=false",
    "speculative_config.method=off",
]
"""A config with blocks and batch rows for every request of the tests, so that none is preempted.

The server is the reference of other tests, so it computes every prompt completely and has no drafts.
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the tiny model in float32 without a prefix cache. Tests may neither stop it nor kill its agent."""
    with running_server(tmp_path_factory.mktemp("server"), ROOMY) as running:
        yield running
        running.wait_until_idle()
