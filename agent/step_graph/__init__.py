"""The compiled graphs of a model, which turn the inputs of one step into logits. Only one thread may run graphs.

``interface`` defines the methods of all graphs. ``static`` has the graph of the fused operators, and ``dynamic`` has
the graphs of the native operators. ``dynamic_cell`` defines the Cells of the dynamic graphs. ``fused_steps`` has the
code that the static graph shares with ``agent.stored_program``. ``replay`` runs steps without MindSpore. ``making``
chooses the graph.
"""
