"""The command ``llm-serving``: its sub-commands, shell completion, and the choice of the Python interpreter."""
