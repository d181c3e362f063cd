"""Launches a step before the host has read the tokens of the previous step. So the device never waits for the host.

The tokens that the device can choose itself stay on the device, and the graph of the next step inserts them into its
inputs:

* ``cells`` has the Cell with which the graph inserts tokens.
* ``draws`` lets the device choose tokens of sequences with a temperature.
* ``odds`` decides when the device draws tokens of sequences without ``top_k``.
* ``inserted`` describes which tokens of a step the graph inserts.
* ``steps`` launches steps, and samples each step when the device has computed it. Only devices with
  ``DeviceTraits.runs_ahead`` use it.
* ``last_tokens`` provides the tokens that the host has chosen.
"""
