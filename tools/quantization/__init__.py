"""What tools/quantize.py is made of: rounding, GPTQ, calibration, and the writer of folders. NumPy only."""
