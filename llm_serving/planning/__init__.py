"""Calculates the memory that a deployment needs, and compares it with the memory of the machine."""
