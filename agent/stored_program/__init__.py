"""Keeps the launches of a fused graph in a file, so that the next start needs neither MindSpore nor a compilation.

The first start compiles the graph with MindSpore and records its launches (``agent.step_graph.replay``). ``program``
names the memory of each argument instead of its address, and makes the launches again in another process. ``proof``
computes a short prompt and a token in both ways. ``store`` keeps the program with the bits of this proof in the folder
of converted weights. ``graph`` runs the steps. A stored program is used only if its proof gives the bits of MindSpore's
graph.
"""
