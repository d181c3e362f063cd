"""Keeps converted weights in files, so that the next start reads them instead of converting the checkpoint again.

``fingerprint`` identifies the config and the checkpoint of an entry. ``entry`` reads and writes one file. ``folder``
manages the files of all models and keeps their total size below a limit.
"""

from agent.weights.cache.folder import WeightCache

__all__ = ["WeightCache"]
