"""OpenTelemetry traces of requests, off by default."""
