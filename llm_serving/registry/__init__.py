"""Serves several models in one server: decides which models are in memory, and replaces a model's weights by a new
version.

Each model in memory has an engine of its own: a thread, a scheduler for each replica, and agents. This isolates the
models: a lost agent, a full queue or a slow grammar of one model does not affect the others. The engine loop also needs
no code for several models. The cost is one more thread for each model, and all threads share Python's interpreter lock.
"""
