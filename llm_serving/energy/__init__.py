"""Measures the energy and the processor time of the server and its agents."""
