"""Readers of documents written by others, strict and bounded; they know nothing of this project's own config."""
