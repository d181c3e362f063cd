"""Limits of a request. They are checked before the text is tokenized and before the request is queued.

llm_serving/sampling_params.py has the limits of sampling parameters and of stop strings.
"""

from __future__ import annotations

MAX_JSON_DEPTH = 32
"""Maximum depth of nested lists and objects in a body."""
MAX_PROMPTS = 256
"""Maximum number of prompts in one request."""
MAX_CHOICES = 64
"""Maximum of ``n``, the number of choices for each prompt."""
MAX_SEQUENCES = 256
"""Maximum number of prompts times ``n`` in one HTTP request."""
MAX_TEMPLATE_VALUES = 32
"""Maximum number of values in ``chat_template_kwargs``."""
MAX_TEMPLATE_VALUE_CHARS = 4096
"""Maximum number of characters of a text in ``chat_template_kwargs``."""
MAX_TOOLS = 128
"""Maximum number of tools in one request."""
MAX_TOOLS_BYTES = 65536
"""Maximum size of all tools of a request together, as JSON."""
MAX_ARGUMENT_VALUES = 65536
"""Maximum number of values and keys in the arguments of all earlier tool calls of a request together.

While Python's JSON parser or encoder works on a text, it keeps the interpreter lock (GIL), so other threads wait. For
this number of values, it takes 7 ms.
"""
MAX_TOOL_NAME_CHARS = 64
"""Maximum length of the name of a tool."""
MAX_MESSAGES = 4096
"""Maximum number of messages of a chat."""
MAX_PREFIX_IDS = 131072
"""Maximum number of token ids in ``prefix_text`` of ``/chat``."""
MAX_NAME_CHARS = 256
"""Maximum length of ids and names in a request."""
MAX_LOGPROBS = 20
"""Maximum number of log-probabilities for each token of a prompt or of a response."""
DEFAULT_REQUEST_CONTEXTS = 64
"""By default, ``serving_config.max_request_tokens`` is this multiple of the maximum length of a sequence."""
MAX_LOGPROB_ENTRIES = 1 << 20
"""Maximum number of log-probabilities in the response to one HTTP request. The server needs 200 bytes for each."""
MAX_BEAM_RESENDS = 64
"""A beam search may send the engine this multiple of ``serving_config.max_request_tokens`` tokens. The multiple is
large, because the search sends the prompt and the beam again for each new token.
"""
MAX_LENGTH_PENALTY = 8.0
"""Largest length penalty of a beam search."""
MAX_PRIORITY = 2**31 - 1
"""Largest priority of a request. The smallest is the same number with a minus sign."""
MAX_MILLISECONDS = 24 * 3600 * 1000
"""Maximum of a request's objectives and deadline in milliseconds: one day."""

BODY_TIMEOUT_S = 30.0
"""Maximum time in seconds until the complete body of a request has arrived."""
HEADER_TIMEOUT_S = 15.0
"""Maximum time in seconds until a request's headers have arrived. For the first request of a connection, the time
begins when the connection opens. For later requests, it begins with their first byte."""
MESSAGE_TIMEOUT_S = BODY_TIMEOUT_S + 5.0
"""Maximum time in seconds from the end of a request's headers to the end of its body. It also applies if no handler
reads the body.
"""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of the headers of a request."""
MAX_FRAMING_RATIO = 8
"""Maximum bytes of chunk framing for each byte of a chunked body. Even chunks with one byte of content need only five
bytes of framing."""
KEEP_ALIVE_S = 75.0
"""Maximum seconds that a connection may stay open without a request."""

INLINE_ITEMS = 2048
"""Maximum number of tokens or log-probabilities that the event loop's thread converts in one call. Another thread
converts longer lists."""
INLINE_TOKENIZE_CHARS = 4096
"""Maximum length of a text that the event loop's thread tokenizes. Another thread tokenizes longer texts, so that they
do not delay other requests."""
INLINE_CHAT_CHARS = 65536
"""Maximum length of a conversation that the event loop's thread renders."""
INLINE_MESSAGES = 128
"""Maximum number of messages and tool calls that the event loop's thread converts and renders."""
INLINE_BODY_BYTES = 65536
"""Maximum size of a request body that the event loop's thread parses. Another thread parses larger bodies."""
INLINE_SCHEMA_BYTES = 4096
"""Maximum size of the schemas of tools that the event loop's thread makes a grammar of."""
MAX_DETOKENIZE = 131072
"""Maximum number of tokens in a request to ``/detokenize``."""
MAX_JSON_VALUES = 262_144
"""Maximum number of values in a request body. It is this high because each token id of a prompt is a value."""
MAX_JSON_OBJECTS = 65536
"""Maximum number of strings in a request body, and also the maximum number of objects plus lists."""
WRITE_TIMEOUT_S = 60.0
"""Seconds for which the server waits until a client reads a written piece. Then the server closes the connection."""
UNSENT_BYTES = 128 * 1024
"""Number of bytes above which the system accepts no further bytes of a connection, until it has sent some of them.

Without this limit, Linux keeps up to 4 MB for a slow client, and accepts further bytes only after a third of them was
sent. A client that reads less than 22 KB/s would then exceed ``WRITE_TIMEOUT_S``. See ``TCP_NOTSENT_LOWAT`` in tcp(7).
"""
