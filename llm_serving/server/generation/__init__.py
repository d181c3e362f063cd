"""Turns the fields of a request into sequences, and runs them in the engine.

The modules read the prompts, the sampling parameters and the constraints, and limit the work of a request.
"""
