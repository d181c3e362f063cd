"""Uses a model in a Python program without HTTP: the engine runs in a thread and starts agent processes."""
