"""The part of sampling that a device does, so that the host fetches a few numbers for each sequence, not all logits.

``cells`` has the graphs: the best token of each sequence, which every step computes; the candidates, which are the 64
best tokens and the mass of the row; and single rows of logits. ``graphs`` compiles and runs them. The host chooses the
tokens (``agent.sampler``).
"""

from agent.device_sampling.cells import BestTokens, candidates_cell, rows_cell
from agent.device_sampling.graphs import SamplingGraphs

__all__ = ["BestTokens", "SamplingGraphs", "candidates_cell", "rows_cell"]
