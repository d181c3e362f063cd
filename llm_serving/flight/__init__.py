"""The flight recorder: every call of the scheduler, what it was given and what it decided, in a bounded ring on disk.

``recorder`` stands before the scheduler, ``ring`` and ``format`` are the files, ``reader`` reads them again.
``docs/flight_recorder.md`` tells what is kept, and ``tools/replay.py`` runs it again.
"""
