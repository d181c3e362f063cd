"""Prepares the images of requests: reads them from URLs, checks and decodes them, and cuts them into tiles for the
agents.

This package does not depend on the HTTP API or the engine. Its functions block, so the event loop must not call them.
"""
