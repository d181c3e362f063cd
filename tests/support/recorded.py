"""The type of pytest's fixture ``record_property``.

With this fixture, a test records the figure of a check in ``docs/reliability.md``. ``tools/reliability/registry.py``
reads it.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RecordProperty"]

RecordProperty = Callable[[str, object], None]
