"""Images of requests: reads them from URLs, checks and decodes them, and cuts them into tiles for the agents.

Nothing here knows HTTP requests or the engine. All functions block, so the event loop must not call them.
"""
