"""The command ``llm-serving``: its sub-commands, shell completion, and a restart with the right Python interpreter."""
