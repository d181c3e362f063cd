"""The networks of models. ``llama.py`` has the network of all families, and ``names.py`` the names of tensors in
checkpoints.
"""
