"""The real agent on an artificial device, which launches steps ahead and often draws wrong tokens."""

from __future__ import annotations

import sys

from agent.model_runner import ModelRunner, StartReport
from agent.process import run_agent
from llm_serving.config import Config
from llm_serving.ipc.exchange import ExchangeMemory
from performance.artificial_device.ops import use_artificial_device
from performance.artificial_device.queue import ArtificialDevice

WRONG_EVERY = 3


def make_runner(config: Config, report: StartReport, rank: int, exchange: ExchangeMemory | None) -> ModelRunner:
    use_artificial_device(ArtificialDevice(device_s=0.001, wrong_every=WRONG_EVERY))
    return ModelRunner(config, report, rank, exchange)


if __name__ == "__main__":
    sys.exit(run_agent(make_runner))
