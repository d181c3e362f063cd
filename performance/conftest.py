"""``test_serving_performance.py`` is a program, not a test: pytest passes it by. Tests are in tests/performance/."""

collect_ignore = ["test_serving_performance.py"]
