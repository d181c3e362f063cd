"""Finds models by name, and lists local models. Downloads missing models from Hugging Face or ModelScope into the usual
caches.
"""
