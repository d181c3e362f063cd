"""Vision encoders: compute, from the tiles of an image, the vectors that replace the embeddings of its image tokens.

The vectors of a tile form a matrix with one row for each image token. This package calls them the rows of the tile.

This package does not import MindSpore.
"""
