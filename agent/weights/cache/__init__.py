"""Keeps converted weights in files, so that the next start reads them instead of converting the checkpoint again.

``fingerprint`` says whether an entry fits a config and its checkpoint. ``entry`` reads and writes one file.
``folder`` has the files of all models and keeps their total size below a limit.
"""

from agent.weights.cache.folder import WeightCache

__all__ = ["WeightCache"]
