"""A model in a Python program, without HTTP: the engine in a thread, with its agent processes."""
