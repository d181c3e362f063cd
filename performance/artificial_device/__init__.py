"""A CPU in the role of a device with a queue: a launch does not wait, and a thread runs launches in their order.

``queue`` is the thread. ``ops`` puts it behind the native op table, so that the agent runs steps ahead
(``agent.run_ahead``) on a machine without an Ascend. Tests and ``performance/bench_step_ahead.py`` use it.
"""
