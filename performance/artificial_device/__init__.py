"""Implements an artificial device: a thread on the CPU that runs graphs asynchronously, as an accelerator does.

A launch of a graph only adds the graph to a queue and returns. The thread runs the queued graphs in order (module
``queue``). The module ``ops`` makes the native operators use this thread. The agent can then launch a step before the
previous step has ended (``agent.run_ahead``), on a machine without an Ascend. Tests and
``performance/bench_step_ahead.py`` use the artificial device.
"""
