"""The endpoints of MindSpore llm-serving: ``/chat``, ``/stream_chat_post``, ``/generate`` and ``/generate_stream``.

The documentation calls MindSpore llm-serving "the published server".
"""
