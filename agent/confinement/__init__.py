"""Confines an agent's process: the kernel refuses what serving does not need, also to code that took over the agent."""
