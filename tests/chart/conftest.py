"""Skips the tests of the Helm chart outside of their own Python environment (``make test-chart``)."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("kubernetes_validate") is None:  # the other tests' environment
    collect_ignore_glob = ["test_*.py"]
