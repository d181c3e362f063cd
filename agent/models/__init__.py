"""The model code: ``llama.py`` has the network of all families, ``names.py`` the names of tensors in checkpoints."""
