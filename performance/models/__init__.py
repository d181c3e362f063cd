"""Defines models with seeded random weights and writes their folders, for tests, golden files and comparisons."""
