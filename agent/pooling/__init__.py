"""Pooled outputs: turns the hidden states of a step into embeddings or scores. Does not import mindspore."""
