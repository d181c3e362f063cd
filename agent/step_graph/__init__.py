"""The compiled graphs of a model, which turn the inputs of one step into logits. Only one thread may run graphs.

``interface`` defines the methods of all graphs, and ``fused_steps`` those of the fused operators. ``static`` is the
graph of the fused operators and ``dynamic`` are the graphs of the native operators. ``dynamic_cell`` is a dynamic graph
as MindSpore sees it. ``replay`` runs steps without MindSpore. ``making`` chooses the graph.
"""
