"""What a request may ask for at most. Checked before anything is tokenised or queued."""

from __future__ import annotations

MAX_JSON_DEPTH = 32
MAX_PROMPTS = 256
MAX_CHOICES = 64
"""Answers to one prompt (``n``)."""
MAX_SEQUENCES = 256
"""Prompts times ``n``."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_MESSAGES = 4096
MAX_NAME_CHARS = 256
"""Ids and names a client gives."""
MAX_LOGPROBS = 20
MAX_TOP_K = 1 << 30
MAX_LENGTH_PENALTY = 8.0
MAX_PRIORITY = 2**31 - 1
MAX_MILLISECONDS = 24 * 3600 * 1000
"""Objectives and deadlines."""

BODY_TIMEOUT_S = 30.0
"""Longest time a request's body may take to arrive."""
HEADER_TIMEOUT_S = 15.0
"""Longest time from the connection, or the first byte of a further request, to the end of its headers."""
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75.0

INLINE_TOKENIZE_CHARS = 4096
"""A longer text is tokenised in a thread, so that it holds nobody up."""
