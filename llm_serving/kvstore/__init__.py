"""KV tiers: copies of computed blocks in host memory and on an SSD, where later requests and later runs find them.

``BlockStore`` is the interface to the engine: one object for each replica. ``docs/kv_tiers.md`` describes the tiers for
operators.
"""
