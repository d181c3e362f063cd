"""Parts of ``tools/train_tiny_llama.py``: the corpus, the tokenizer, the model, the trainer and the export."""
