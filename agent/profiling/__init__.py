"""Profiles the steps of an agent while it serves: a timeline of its steps, and MindSpore's profile of the operators."""

from agent.profiling.profiling import Profiling

__all__ = ["Profiling"]
