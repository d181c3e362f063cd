"""Sessions: the tokens of conversations, and files with the tokens and the KV blocks of one conversation.

``SessionBook`` remembers the conversations of a server. ``session_file`` is the format of a file, ``exporting`` writes
one and ``importing`` reads one. ``docs/sessions.md`` describes sessions for users.
"""
