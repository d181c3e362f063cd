"""The flight recorder keeps every call of the scheduler, with its inputs and its decision, in a bounded ring on disk.

``recorder`` wraps the scheduler, and ``journal`` decides what is written of each call. ``decode_log`` collects
undisturbed decoding, ``step_writer`` encodes steps, ``requests`` numbers the requests and names their
tokens. ``segments``, ``ring`` and ``format`` define the files, and ``state`` the scheduler state that each begins
with. ``reader`` and ``steps`` read them, and ``history`` follows requests through them. ``docs/flight_recorder.md``
describes what is kept; ``tools/replay.py`` runs a recording again.
"""
