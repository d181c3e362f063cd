"""Models by name: downloads from Hugging Face and ModelScope into their usual caches, and lists local models."""
