"""The two op tables of the CPU: ``ops`` with fused custom operators, ``native`` with the native primitives."""
