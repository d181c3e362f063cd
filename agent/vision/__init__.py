"""Vision encoders: turn the tiles of images into rows that replace the embeddings of image tokens.

This package does not import MindSpore.
"""
