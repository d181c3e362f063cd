"""Keeps arrays that an agent can make again in files, so that the next start reads them: above all converted weights.

``fingerprint`` identifies the config and the checkpoint of an entry. ``entry`` reads and writes one file. ``folder``
manages the files of all models and keeps their total size below a limit.
"""
