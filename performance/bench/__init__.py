"""Benchmarks without HTTP, and comparisons with the limits of the machine.

ceilings          read bandwidth and peak rates of this machine, measured in a separate process
roofline          the minimum time of a model's step on such a machine
against           compares two trees in alternating runs
engine            scheduler, executor and a real agent in one process, with the time of every token
engine_rows       rates and times of one batch size or prefill length
engine_main       bench_engine.py
engine_host       bench_engine_host.py
kernel_cases      kernels and shapes, with the minimum of bytes and operations
kernel_main       bench_kernels.py
step_kernels      the kernels of a step, called one by one
cpu_share         processor time of server, agents and client
serving_main      bench_serving.py
op_tables_main    compare_op_tables.py
parallel_main     bench_parallel.py
collectives_main  bench_collectives.py
plots             pictures of kernels, of the engine, and of other engines
"""
