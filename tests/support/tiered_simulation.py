"""A simulation with KV tiers: the real ``BlockStore`` and SSD tier next to the scheduler and the fake device.

The mover has no thread. The test decides when its jobs run, so a script always has the same result.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from llm_serving.kvstore.disk import DiskTier
from llm_serving.kvstore.store import BlockStore
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.output import ScheduledStep, StepReason
from support.fake_device import FakeDevice
from support.simulation import Simulation

NAMESPACE = bytes(32)
_SALTS: dict[bytes, bytes] = {}
"""The salt of each stored block, by its chained hash. It outlives a simulation, as the SSD does."""


class ManualMover:
    """A mover whose jobs run when the test calls ``run``. Urgent jobs run before the others."""

    def __init__(self) -> None:
        self.urgent: list[Callable[[], None]] = []
        self.others: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None], *, urgent: bool = False) -> None:
        (self.urgent if urgent else self.others).append(job)

    def run(self, number: int = 1 << 30) -> int:
        """Runs up to ``number`` jobs. Returns how many ran."""
        count = 0
        while count < number and (self.urgent or self.others):
            (self.urgent or self.others).pop(0)()
            count += 1
        return count

    def close(self) -> None:
        self.run()

    @property
    def is_busy(self) -> bool:
        return False


def disk_tier(folder: Path, *, max_bytes: int = 1 << 30, segment_bytes: int = 4096) -> tuple[DiskTier, ManualMover]:
    """Returns an open SSD tier with a mover of the test's own."""
    problems: list[str] = []
    disk = DiskTier(folder, max_bytes, problems.append, segment_bytes=segment_bytes)
    mover = ManualMover()
    disk.mover = mover  # type: ignore[assignment]
    disk.open(lambda: NAMESPACE)
    mover.run()
    return disk, mover


class DevicePool:
    """The host blocks of a fake device, as bytes."""

    is_usable = True
    blocks_at_once = 3

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._size = device.limits.block_size
        self.block_bytes = 4 * self._size

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        return [struct.pack(f"<{self._size}i", *self._device.host[self._part(block)]) for block in blocks]

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> int:
        for block, content in zip(blocks, contents, strict=True):
            self._device.host[self._part(block)] = struct.unpack(f"<{self._size}i", content)
        return len(blocks)

    def _part(self, block: int) -> slice:
        return slice(block * self._size, (block + 1) * self._size)


class TieredSimulation(Simulation):
    """A simulation whose scheduler has KV tiers. ``chance`` is the chance that the mover runs a job after a step."""

    def __init__(
        self,
        limits: SchedulerLimits,
        tier_hosts: int,
        disk: tuple[DiskTier, ManualMover] | None = None,
        *,
        chance: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(limits)
        self.device = FakeDevice(limits, tier_hosts=tier_hosts)
        self.mover = ManualMover() if disk is None else disk[1]
        self._rng = random.Random(seed)
        self._chance = chance
        tier = None if disk is None else disk[0]
        self.store = BlockStore(limits.num_host_blocks, tier_hosts, tier, lambda: None, always_loads=True)
        self.store.figures.disk = None if tier is None else tier.figures
        self.store.open(DevicePool(self.device))

    def schedule(self) -> list[ScheduledStep]:
        steps = super().schedule()
        while not steps and not self.device.queue and not self.answers and self.mover.run():
            steps = super().schedule()
        return steps

    def _next_step(self) -> ScheduledStep | None:
        while self._rng.random() < self._chance and self.mover.run(1):
            pass
        self.store.exchange(self.scheduler, self.now)
        step = super()._next_step()
        if step is None and self.store.exchange(self.scheduler, self.now):
            step = super()._next_step()
        return step

    def _watch(self, step: ScheduledStep) -> None:
        """Gives the salt watch the salt of each host block that was read from the disk."""
        keys = self.store._hosts.keys
        if step.reason is StepReason.LOAD:
            for move in step.moves:
                self._salt_watch._host[move.source] = _SALTS[keys[move.source].chained_hash]
        super()._watch(step)
        if step.reason is StepReason.STORE:
            for move in step.moves:
                _SALTS[keys[move.destination].chained_hash] = self._salt_watch._host[move.destination]

    def _check_busy(self) -> None:
        if not self.mover.urgent:
            super()._check_busy()

    def lose_agent(self, *, blameless: bool = False) -> None:
        super().lose_agent(blameless=blameless)
        self.store.lose(distrusted=blameless)
        self.store.open(DevicePool(self.device))

    def check_quiet(self) -> None:
        super().check_quiet()
        self.mover.run()
        while self.store.exchange(self.scheduler, self.now) or self.mover.run():
            pass
        assert not self.scheduler.take_released()
        assert not self.store._hosts._holds, "host blocks are held although nothing moves"
        assert not self.store._waiting
        hosts = self.store._hosts
        known = [*hosts._free, *hosts._idle]
        assert len(known) == len(set(known)) == self.device.tier_hosts, "a host block is lost"
