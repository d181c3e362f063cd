"""The compiled graphs of a model: one call a step, logits out. One thread may run graphs.

``interface``: what every kind of graph offers; ``selector``: which kind an op table is for; ``static`` and ``dynamic``:
the two kinds; ``dynamic_cell``: a dynamic graph as MindSpore sees it; ``inputs`` and ``logits``: what goes into a graph
beside a step's own arrays, and what comes out; ``compiled``: compilation and execution of any of them by MindSpore.
"""

from agent.step_graph.dynamic_cell import GraphKind, dynamic_step
from agent.step_graph.interface import OperatorRefusedError, StepGraph
from agent.step_graph.logits import StepLogits
from agent.step_graph.selector import make_step_graph

__all__ = ["GraphKind", "OperatorRefusedError", "StepGraph", "StepLogits", "dynamic_step", "make_step_graph"]
