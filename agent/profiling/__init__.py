"""Profiles the steps of an agent while it serves: writes a timeline of the steps, and MindSpore's profile of the
operators.
"""

from agent.profiling.profiling import Profiling

__all__ = ["Profiling"]
