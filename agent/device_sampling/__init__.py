"""Does the expensive part of sampling on the device, so that the host does not have to fetch all logits.

The graph of every step finds the token with the largest logit of each sequence. A second graph finds the candidates:
for each sequence, the 64 best tokens and the sum of the exponentials of all logits. A third graph gathers the logits of
selected sequences. ``cells`` defines the Cells of all three. ``graphs`` compiles and runs the graph for candidates and
the graph for selected sequences. The host chooses the tokens from these values (``agent.sampler``).
"""

from agent.device_sampling.cells import BestTokens, candidates_cell, rows_cell
from agent.device_sampling.graphs import SamplingGraphs

__all__ = ["BestTokens", "SamplingGraphs", "candidates_cell", "rows_cell"]
