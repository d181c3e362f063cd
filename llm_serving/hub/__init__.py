"""Finds models by name: downloads them from Hugging Face or ModelScope into the usual caches, and lists local models.
"""
