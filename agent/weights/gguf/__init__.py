"""Reads the tensors of GGUF files (llama.cpp's format) as a ``WeightSource``. The interface is ``file.GGUFFile``."""
