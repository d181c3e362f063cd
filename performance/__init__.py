"""Contains the programs that measure: load test, benchmarks and simulator."""
