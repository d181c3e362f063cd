"""Parts of tools/quality_gate.py."""
