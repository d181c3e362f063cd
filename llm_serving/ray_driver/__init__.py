"""The process that talks to Ray: places nodes in a Ray cluster, watches them, and places others after a loss.

Only this package imports Ray. Steps never go through Ray: the server connects to each node itself.
"""
