"""Limits of a request. They are checked before the text is tokenized and before the request is queued.

The limits of sampling parameters, also of stop strings, are in llm_serving/sampling_params.py.
"""

from __future__ import annotations

MAX_JSON_DEPTH = 32
MAX_PROMPTS = 256
MAX_CHOICES = 64
"""Maximum of ``n``, the number of choices for each prompt."""
MAX_SEQUENCES = 256
"""Maximum of prompts times ``n``."""
MAX_MESSAGES = 4096
MAX_NAME_CHARS = 256
"""Maximum length of ids and names that a client gives."""
MAX_LOGPROBS = 20
MAX_LENGTH_PENALTY = 8.0
MAX_PRIORITY = 2**31 - 1
MAX_MILLISECONDS = 24 * 3600 * 1000
"""Maximum of objectives and deadlines."""

BODY_TIMEOUT_S = 30.0
"""Maximum time for the arrival of a request's body."""
HEADER_TIMEOUT_S = 15.0
"""Maximum time from the connection, or from the first byte of a further request, to the end of the headers."""
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75.0

INLINE_TOKENIZE_CHARS = 4096
"""A longer text is tokenized in another thread, so that it does not delay other requests."""
