"""The compiled graphs of a model, which turn the inputs of one step into logits. Only one thread may run graphs.

``interface`` defines the methods of all graphs. ``making`` chooses the kind of graph. ``static`` has the graph of the
fused operators, and ``dynamic`` has the graphs of the native operators, whose Cells are in ``dynamic_cell``.
``fused_steps`` has the code that the static graph shares with ``agent.stored_program``. ``replay`` runs steps without
MindSpore. ``head_graph`` and ``head_steps`` have the graphs of a head, and their code that does not need MindSpore.
"""
