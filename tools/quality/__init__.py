"""What tools/quality_gate.py is made of."""
