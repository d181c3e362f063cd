"""The front-end gate of the Ascend graphs: compile without an NPU, list, check, compare. See docs/ascend.md."""
