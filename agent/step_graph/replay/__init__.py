"""Runs steps on a CPU without MindSpore: records the kernel launches of a graph once and replays them for each step.

``fused`` does this for the static graph of fused operators, ``native`` for the dynamic graphs of native operators.
"""
