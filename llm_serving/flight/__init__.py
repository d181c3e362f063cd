"""The flight recorder: every call of the scheduler, what it was given and what it decided, in a bounded ring on disk.

``recorder`` stands before the scheduler and ``journal`` decides what is written of its calls and when: ``calls`` as
they are taken down, ``turns`` alike as one record, ``step_writer`` the steps, ``known_requests`` and ``identities`` who
they are about, ``counts`` of the scheduler. ``segments``, ``ring`` and ``format`` are the files, ``state`` what each
begins with; ``reader`` and ``steps`` read them again, and ``history`` follows requests through them.
``docs/flight_recorder.md`` tells what is kept, and ``tools/replay.py`` runs it again.
"""
