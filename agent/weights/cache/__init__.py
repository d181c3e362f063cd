"""Caches arrays, mainly converted weights, in files. The next start of an agent reads them instead of computing them.

``fingerprint`` identifies the config and the checkpoint of an entry. ``entry`` reads and writes one file. ``folder``
manages the files of all models and keeps their total size below a limit.
"""
