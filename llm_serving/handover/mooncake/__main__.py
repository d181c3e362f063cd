"""Runs Mooncake's engine for a node: ``python -m llm_serving.handover.mooncake DESCRIPTOR``."""

from __future__ import annotations

import socket
import sys

from llm_serving.handover.mooncake.engine import serve

if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
