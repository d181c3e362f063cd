"""Caches arrays in files, so that the next start of an agent need not compute them again: mainly converted weights.

``fingerprint`` identifies the config and the checkpoint of an entry. ``entry`` reads and writes one file. ``folder``
manages the files of all models and keeps their total size below a limit.
"""
