"""Launches a step before the host has read the tokens of the step before, so that the device never waits for the host.

The tokens of greedy sequences stay on the device, and the graph of the next step inserts them (``cells``). ``steps``
keeps the launched steps and samples each of them when the device has computed it. ``inserted`` connects the two. Only
devices with ``DeviceTraits.runs_ahead`` use ``steps``.
"""
