"""The shared memory of one group of agents: the step slots, and for more than one agent the exchange."""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.errors import AgentStartError
from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory
from llm_serving.ipc.segment import SHM_DIRECTORY
from llm_serving.ipc.shm import NUM_SLOTS, SlotLayout, SlotMemory, StepSlot


class GroupMemory:
    """Made, and freed, by the server; every agent of the group maps all of it."""

    def __init__(self, slot_memory: SlotMemory, exchange: ExchangeMemory | None) -> None:
        self.slot_memory = slot_memory
        self.exchange = exchange

    @classmethod
    def create(cls, config: Config) -> GroupMemory:
        """New segments, their pages reserved. Raises AgentStartError when /dev/shm has no room for them."""
        limits, parallel = config.slot_limits(), config.parallel_config
        layout = None if parallel.group_size == 1 else ExchangeLayout.of(config.shape, limits, parallel)
        try:
            slot_memory = SlotMemory.create(limits, NUM_SLOTS)
            try:
                return cls(slot_memory, None if layout is None else ExchangeMemory.create(layout))
            except BaseException:
                slot_memory.close()
                raise
        except OSError as error:
            needed = SlotLayout.of(limits).slot_bytes * NUM_SLOTS + (0 if layout is None else layout.num_bytes)
            raise AgentStartError(
                f"{SHM_DIRECTORY} has no room for {needed} bytes of step slots and exchange: {error.strerror}; "
                "give it more, or lower scheduler_config.max_num_batched_tokens"
            ) from error

    @property
    def slots(self) -> list[StepSlot]:
        return self.slot_memory.slots

    @property
    def exchange_name(self) -> str:
        """Empty without one."""
        return "" if self.exchange is None else self.exchange.name

    @property
    def exchange_bytes(self) -> int:
        return 0 if self.exchange is None else self.exchange.layout.num_bytes

    def mark_down(self) -> None:
        """Tell agents that wait for one another that one of them is gone."""
        if self.exchange is not None:
            self.exchange.mark_down()

    def unlink(self) -> None:
        """Remove the names; the mappings stay. May be called twice."""
        self.slot_memory.unlink()
        if self.exchange is not None:
            self.exchange.unlink()

    def close(self) -> None:
        """Remove the names and drop the views."""
        self.slot_memory.close()
        if self.exchange is not None:
            self.exchange.close()
