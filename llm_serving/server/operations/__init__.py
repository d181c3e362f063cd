"""Endpoints for operators: health, metrics, models, adapters, profiles and receipts."""
