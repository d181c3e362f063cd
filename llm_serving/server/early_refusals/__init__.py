"""Refuses requests that cannot be accepted now, before their body is read."""
