"""Runs single kernels outside any graph, for tests and benchmarks.

``libllm_kernels_testing.so`` holds the object files of the product library, scalar references (``reference.h``) and the
entries of ``entries.cc``. The folder ``ceilings/`` has the source of the program ``performance/ceilings``, which
measures the limits of the hardware: memory bandwidth and operations per second.
"""
