"""Endpoints for operators: health, metrics, models, adapters, device profiles, and receipts (times of a request)."""
