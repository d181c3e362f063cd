"""Caches arrays, mainly converted weights, in files. The next start of an agent reads them instead of computing them.

``entry`` reads and writes one file. ``fingerprint`` computes a digest of everything on which the arrays of a file
depend. ``folder`` manages the files of all models and keeps their total size below a limit.
"""
