"""Models with seeded random weights, written as Hugging Face folders: for tests, golden files and comparisons."""
