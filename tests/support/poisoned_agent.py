"""The real agent, except that a step kills it if a prompt contains the tokens ``POISON`` one after the other."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from agent.model_runner import ModelRunner, StepCost
from agent.process import run_agent
from llm_serving.ipc.shm import StepSlot

POISON = [3, 3, 3, 3, 3]


class PoisonedRunner(ModelRunner):
    def run_step(self, slot: StepSlot, *, is_decode: bool) -> StepCost:
        tokens = slot.token_ids[: slot.num_tokens].tolist()
        if any(tokens[index : index + len(POISON)] == POISON for index in range(len(tokens))):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run_step(slot, is_decode=is_decode)


if __name__ == "__main__":
    sys.exit(run_agent(partial(PoisonedRunner, keeps_files=True)))
