"""Events of the prefix cache for other systems, over ZeroMQ: which blocks are cached, with their tokens.

A router in front of several servers can follow the events and send a request to the server that has its prefix.
"""
