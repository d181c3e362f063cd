"""Sampling on the device, so that the host fetches a few numbers for each sequence instead of all logits.

``cells`` has the graphs. Every step finds the best token of each sequence. Another graph finds the candidates: for each
sequence, the 64 best tokens and the sum of the exponentials of all logits. A third graph gathers single rows of logits.
``graphs`` compiles and runs them. The host chooses the tokens (``agent.sampler``).
"""

from agent.device_sampling.cells import BestTokens, candidates_cell, rows_cell
from agent.device_sampling.graphs import SamplingGraphs

__all__ = ["BestTokens", "SamplingGraphs", "candidates_cell", "rows_cell"]
