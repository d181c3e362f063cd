"""What differs between devices: the op table, the runtime's settings, and a selector. See ``agent.backends.base``."""
