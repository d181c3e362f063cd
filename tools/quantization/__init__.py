"""Parts of tools/quantize.py: rounding, GPTQ, calibration, and the writer of folders. They use only NumPy."""
