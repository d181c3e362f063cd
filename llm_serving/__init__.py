"""The control plane: HTTP, tokenizer, scheduler and KV blocks. It never imports MindSpore or device code."""

__version__ = "0.1.0"
