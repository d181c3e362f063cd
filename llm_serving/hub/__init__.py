"""Models by name: downloads from Hugging Face and ModelScope into their usual caches, and a list of what is there."""
