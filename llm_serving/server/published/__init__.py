"""The endpoints of the published server: ``/chat``, ``/stream_chat_post``, ``/generate`` and ``/generate_stream``."""
