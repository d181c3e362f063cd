"""Reads the energy counters (RAPL) of Intel and AMD processors from ``/sys/class/powercap``.

Each zone has a file ``energy_uj`` in microjoules. The counter starts again at 0 after ``max_energy_range_uj``. Since
Linux 5.10, only root may read it. The source is the kernel's Documentation/power/powercap/powercap.rst.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_COUNTED = ("package", "dram")
"""Prefixes of the names of the zones whose energy is added up. Zones of cores are left out, because the zone of their
package includes them.
"""


class RaplZone:
    """One energy counter of the machine."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or ValueError if the counter cannot be read."""
        self._counter = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._counter.read_text())
        self._total = 0

    def joules(self) -> float:
        """Returns the energy in joules that the zone has used since this object was created.

        The counter starts again at 0 when it overflows. Call this method before it can overflow twice.
        """
        now = int(self._counter.read_text())
        self._total += now - self._last if now >= self._last else now + self._range + 1 - self._last
        self._last = now
        return self._total / 1e6


def open_zones(folder: Path = POWERCAP) -> Sequence[RaplZone]:
    """Returns the counters of all packages and memories of the machine. Empty if there are none that may be read."""
    zones = []
    for path in sorted(folder.glob("intel-rapl:*")):
        try:
            if (path / "name").read_text().startswith(_COUNTED):
                zones.append(RaplZone(path))
        except (OSError, ValueError):
            continue
    return zones
