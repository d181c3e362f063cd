"""Compiles the Ascend graphs without an NPU, lists them, checks them and compares them. See docs/ascend.md."""
