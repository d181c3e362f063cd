"""Stores the launches of a fused graph in a file, so that the next start needs neither MindSpore nor a compilation.

The first start compiles the graph with MindSpore and finds its launches. The stored launches are called the program of
the agent. A later start uses the program only if a proof (a short prompt and one decode step) gives the same bits as
MindSpore's graph.

* ``trace`` finds the launches of a graph.
* ``program`` converts launches for the file: addresses differ in each process, so each argument names its memory.
* ``store`` writes the program to the folder of converted weights, with a digest of the proof's results, and reads it.
* ``proof`` runs the proof.
* ``graph`` runs steps with the launches of a program.
* ``start`` does all this at the start of an agent.
"""
