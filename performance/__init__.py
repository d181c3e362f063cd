"""Programs that measure or simulate the server: load test, benchmarks and simulator."""
