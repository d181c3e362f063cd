"""The measurement of a model's quality, for ``tools/quality_gate.py``."""
