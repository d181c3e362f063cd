"""The endpoints for embeddings, scores and classes. They generate no text."""
