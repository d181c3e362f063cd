"""Launches a step before the host has read the tokens of the previous step. So the device never waits for the host.

The sampled tokens of greedy sequences stay on the device, and the graph of the next step inserts them into its inputs
(``cells``). ``inserted`` describes which tokens the graph inserts. ``steps`` keeps the launched steps, and samples each
step when the device has computed it. ``last_tokens`` provides the tokens that the host has chosen. Only devices with
``DeviceTraits.runs_ahead`` use ``steps``.
"""
