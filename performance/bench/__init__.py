"""Benchmarks of kernels, engine and server, and comparisons with the limits of the machine.

ceilings          measures the machine's read bandwidth and peak arithmetic rates in a separate process
roofline          calculates the minimum time of a model's step from these ceilings
against           runs a benchmark of two source trees alternately and compares the results
engine            drives scheduler, executor and a real agent without a server, and records the time of every token
engine_rows       measures rates and times of the engine for one batch size or prefill length
engine_main       the program bench_engine.py
engine_host       the program bench_engine_host.py
kernel_cases      defines the measured kernels and shapes, and the minimum bytes and operations of a call
kernel_main       the program bench_kernels.py
step_kernels      measures the kernels of a step, called one by one
cpu_share         measures the processor time of server, agents and client
serving_main      the program bench_serving.py
quiet_main        the program bench_quiet.py
op_tables_main    the program compare_op_tables.py
parallel_main     the program bench_parallel.py
collectives_main  the program bench_collectives.py
plots             draws the results for kernels, for the engine, and for other engines
"""
