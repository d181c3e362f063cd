"""Stores the launches of a fused graph in a file, so that the next start needs neither MindSpore nor a compilation.

The first start compiles the graph with MindSpore and finds its launches. The stored launches are called the program of
the agent. Addresses differ in each process, so ``program`` stores a name for the memory of each argument. In another
process, ``program`` restores the launches. ``proof`` runs a short prompt and one decode step. ``store`` writes the
program to the folder of converted weights, together with a digest of the proof's results from MindSpore's graph. A
later start uses the program only if its proof gives the same digest. ``graph`` then runs the steps.
"""
