"""The control plane: HTTP, tokenizer, scheduler, KV block accounting. Never imports mindspore or device code."""

__version__ = "0.1.0"
