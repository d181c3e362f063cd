"""Publishes events of the prefix cache over ZeroMQ for other systems: which blocks are cached, with their tokens.

A router in front of several servers can follow the events. It can then send a request to the server that has the
prefix of the request.
"""
