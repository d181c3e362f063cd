"""Calculates a server's processor time and energy during a load, from its metrics before and after the load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CPU_METRIC = "llm_serving_cpu_seconds_total"
ENERGY_METRIC = "llm_serving_energy_joules_total"


@dataclass(frozen=True, slots=True)
class ServerCost:
    """The cost of a load: how much the server's counters increased during the load."""

    cpu_s: float | None = None
    """Processor seconds of the server and of its agents on the same machine. None if the server does not measure them.
    """
    joules: float | None = None
    """Energy of the server's machine. None if the server does not measure it."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> ServerCost:
        def difference(name: str) -> float | None:
            return after[name] - before[name] if name in before and name in after else None

        return cls(difference(CPU_METRIC), difference(ENERGY_METRIC))

    def as_dict(self, output_tokens: int) -> dict[str, float | None]:
        """Returns processor time and energy of the whole load, and both per 1000 output tokens. None: not measured."""

        def for_1000(value: float | None) -> float | None:
            return None if value is None or not output_tokens else 1000 * value / output_tokens

        return {
            "cpu_s": self.cpu_s,
            "cpu_s_per_1000_tokens": for_1000(self.cpu_s),
            "joules": self.joules,
            "joules_per_1000_tokens": for_1000(self.joules),
        }
