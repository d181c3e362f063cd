"""Excludes ``test_serving_performance.py`` from pytest, because it is a program. Tests are in tests/performance/."""

collect_ignore = ["test_serving_performance.py"]
