"""Confines an agent's process: Linux refuses it all files and system calls that serving does not need.

Code of an attacker that runs in the agent cannot lift the confinement.
"""
