"""Benchmarks against the hardware's ceilings, without HTTP unless said.

    ceilings        read bandwidth and peak rates of this machine, measured in a process of their own
    roofline        the least time a model's step can take on such a machine
    numbers         lists of numbers on a command line, medians, the JSON of a run
    engine          scheduler, executor and a real agent driven in-process, with the times of every token
    engine_rows     a measurement as rows of the result
    engine_main     bench_engine.py
    kernel_cases    which kernels at which shapes, with the bytes and operations each cannot do without
    kernel_main     bench_kernels.py
    step_kernels    the kernels of a whole step, called one by one
    cpu_share       CPU time of server, agents and client
    serving_main    bench_serving.py
    plots           the pictures

The programs themselves are in performance/.
"""
