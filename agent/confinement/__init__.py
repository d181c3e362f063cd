"""Confines an agent's process: Linux refuses it all files and system calls that serving does not need.

The process cannot lift the confinement, even if code of an attacker runs in it.
"""
