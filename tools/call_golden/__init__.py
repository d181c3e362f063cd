"""Renders tool calls with the libraries of other projects, for ``tools/make_call_golden.py`` and its tests."""
