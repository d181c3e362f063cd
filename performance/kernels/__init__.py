"""Runs single kernels outside any graph, for tests and benchmarks.

``libllm_kernels_testing.so`` holds the object files of the product library, scalar references (``reference.h``) and the
entries of ``entries.cc``. The program ``performance/ceilings`` measures the hardware's
limits: memory bandwidth and operations per second. It is built from ``ceilings/``.
"""
