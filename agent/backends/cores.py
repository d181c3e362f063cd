"""Divides the processor cores of a machine between agents."""

from __future__ import annotations

from collections.abc import Sequence


def own_cores(cores: Sequence[int], rank: int, num_agents: int) -> Sequence[int]:
    """Returns the cores that one of ``num_agents`` agents may use.

    With at least as many cores as agents, no two agents share a core, and their numbers of cores differ by at most one.
    Otherwise every agent may use all cores.
    """
    if len(cores) < num_agents:
        return cores
    return cores[rank * len(cores) // num_agents : (rank + 1) * len(cores) // num_agents]
