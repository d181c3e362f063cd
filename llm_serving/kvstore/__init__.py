"""KV tiers keep copies of computed KV blocks in host memory, on an SSD and in a folder that several machines share.

Later requests load these copies instead of computing the blocks again. Copies on disk also survive a restart.
``BlockStore`` is the interface to the engine, with one object for each replica. ``docs/kv_tiers.md`` describes the
tiers for operators.
"""
