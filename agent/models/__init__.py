"""The models: ``llama`` has the network of all families, ``names`` has the names of their tensors in checkpoints."""
