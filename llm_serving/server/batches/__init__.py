"""OpenAI's files and batches: requests in a file, computed with the lowest priority, and kept on disk."""
