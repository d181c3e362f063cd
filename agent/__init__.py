"""The data plane: one process per device. Owns weights, KV cache, compiled graphs, sampling; knows token ids only."""
