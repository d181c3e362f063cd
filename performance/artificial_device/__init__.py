"""An artificial device: the CPU acts as a device with a queue of launches.

A launch returns immediately, and a thread runs the queued launches in their order. ``queue`` implements this thread.
``ops`` connects it to the native op table, so that the agent runs steps ahead (``agent.run_ahead``) on a machine
without an Ascend. Tests and ``performance/bench_step_ahead.py`` use the artificial device.
"""
