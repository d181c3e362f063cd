"""Reads GGUF files (llama.cpp's format) without their tensors' values: metadata, sizes of the model, vocabulary.

``agent/weights/gguf`` reads the tensors.
"""
