"""The agent: a process that owns one device, with its weights, KV cache, compiled graphs and sampler.

The agent knows token ids, not text. The server starts one agent process for each device.
"""
