"""Runs the inference models of MindFormers instead of this project's own models. docs/mindformers.md describes this.

The Python extra ``[mindformers]`` installs MindFormers.
"""
