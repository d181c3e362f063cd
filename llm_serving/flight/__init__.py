"""The flight recorder writes every call of the scheduler, with inputs and decision, to files of limited total size.

Modules that write: ``recorder`` wraps the scheduler, and ``journal`` decides what is written. ``decode_log`` compresses
decoding with an unchanged batch, ``step_writer`` encodes steps, ``requests`` numbers requests and replaces their
tokens. Modules for the files: ``format``, ``ring`` and ``segments``. ``state`` saves the scheduler's state at the start
of each file. Modules that read: ``reader`` and ``steps`` restore the calls, and ``history`` finds steps and requests in
them. ``docs/flight_recorder.md`` describes the content; ``tools/replay.py`` runs a recording again.
"""
