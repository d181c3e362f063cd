"""Confines an agent's process: Linux refuses access to files, and system calls, that an agent does not need.

The process cannot lift the confinement, even if code of an attacker runs in it.
"""
