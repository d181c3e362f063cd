"""Keeps the launches of a fused graph in a file, so that the next start needs neither MindSpore nor a compilation.

The first start compiles the graph with MindSpore and finds its launches. The stored launches are called the program of
the agent. ``program`` stores a name for the memory of each argument, because addresses change, and restores the
launches in another process. ``proof`` runs a short prompt and one decode step. ``store`` keeps the program, and the
bits of the proof that MindSpore's graph computed, in the folder of converted weights. A later start uses the program
only if its proof has the same bits. ``graph`` then runs the steps.
"""
