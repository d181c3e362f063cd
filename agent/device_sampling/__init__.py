"""The part of sampling that a device does, so that the host fetches a few numbers for each sequence, not all logits.

``cells`` has the graphs. Every step finds the best token of each sequence. Another graph finds the candidates: the 64
best tokens of each row and its mass. A third graph gathers single rows of logits. ``graphs`` compiles and runs them.
The host chooses the tokens (``agent.sampler``).
"""

from agent.device_sampling.cells import BestTokens, candidates_cell, rows_cell
from agent.device_sampling.graphs import SamplingGraphs

__all__ = ["BestTokens", "SamplingGraphs", "candidates_cell", "rows_cell"]
