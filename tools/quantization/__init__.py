"""Converts weights for ``tools/quantize.py``: rounding, GPTQ, calibration and writing, only with NumPy."""
