"""Strict readers of small files (JSON, YAML, GGUF metadata), with limits on size and nesting depth."""
