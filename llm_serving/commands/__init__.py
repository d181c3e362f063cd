"""The command ``llm-serving``: its sub-commands, their programs, and shell completion."""
