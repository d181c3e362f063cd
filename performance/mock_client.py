#!/usr/bin/env python3
"""Talks to a server's /chat as several users: ``python performance/mock_client.py --parallel 4 --rounds 3``."""

from entry import run

run("performance.load.mock_chat")
