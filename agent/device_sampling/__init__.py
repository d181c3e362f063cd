"""Does the expensive part of sampling on the device, so that the host does not have to fetch all logits.

The graph of every step finds the token with the largest logit of each sequence. A second graph finds the candidates:
for each sequence, the 64 best tokens and the sum of the exponentials of all logits. A third graph gathers the logits of
selected sequences. The host chooses the tokens from these values (``agent.sampler``). If steps are launched ahead, a
fourth graph draws tokens among the candidates, so that the next step need not wait for the host.

``cells`` defines the Cells of the first three graphs, and ``draws`` the Cell of the fourth. ``graphs`` compiles and
runs the graphs for candidates, for selected sequences and for draws.
"""

from agent.device_sampling.cells import BestTokens, candidates_cell, num_drawable, rows_cell
from agent.device_sampling.draws import draws_cell
from agent.device_sampling.graphs import SamplingGraphs

__all__ = ["BestTokens", "SamplingGraphs", "candidates_cell", "draws_cell", "num_drawable", "rows_cell"]
