"""Trains the tiny Llama for ``tools/train_tiny_llama.py``: corpus, tokenizer, model, trainer and export."""
