"""The load test, the benchmarks and the simulator: programs that measure."""
