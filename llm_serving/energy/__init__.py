"""Measures the energy and the processor time of the server and of its agents on the same machine."""
