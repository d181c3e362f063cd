"""The memory that a deployment needs and the memory of the machine."""
