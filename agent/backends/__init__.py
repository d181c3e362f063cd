"""The code that differs between devices: op tables, traits, hooks, and the set-up of MindSpore. See
``agent.backends.base``."""
