"""An agent process without a device: the real socket thread, queue and worker, with arithmetic instead of a model.

The token sampled for a sequence is ``(context length * 31 + row * 7) % 251``. Some prompt tokens and some model names
make it fail in different ways. Tests run it as ``python -m support.stub_agent`` instead of ``python -m agent``. In a
group, all agents run the step, and one of them writes the sampled tokens. With the model ``bad-last-agent`` only the
last agent fails in these ways. A LoRA adapter adds the CRC of its bytes to the tokens of its sequences.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import zlib
from pathlib import Path

import numpy as np

from agent.cache_pages import LaterPages
from agent.model_runner import StartReport
from agent.process import run_agent
from agent.profiling import Profiling
from agent.step_cost import StepCost
from llm_serving.config import Config
from llm_serving.errors import AgentError, ProtocolError
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.messages import ProfileReply
from llm_serving.ipc.shm import NO_ADAPTER, StepSlot
from llm_serving.model.parallel import answering_rank, group_ranks

DIE, RAISE, REFUSE, HANG, SLOW, BUSY, SPIN, SPIN_CHILD, COMPILE, AWAIT = range(201, 211)
"""Token ids that make the agent misbehave.

DIE kills the agent, RAISE raises an unforeseen error, REFUSE refuses the step, HANG never returns, and SLOW returns
after 0.2 s. BUSY computes for 0.1 s of processor time, and SPIN computes without end. SPIN_CHILD waits for a child
process that computes without end. COMPILE reports that the agent compiles, and computes for ``COMPILE_S`` of processor
time. AWAIT sleeps until another process opens the pipe ``AWAITED`` in the folder of the log.
"""
COMPILE_S = 1.0
AWAITED = "awaited"


BAD_BLOCK = 77
"""A source block that the agents without results report as damaged, 0.2 s after the agent with results has replied."""
ANALYSIS_S = 0.2
"""Processor time that the analysis of a profile takes, in seconds."""


BAD_ADAPTER = b"bad"
"""Beginning of an adapter that cannot be loaded."""


def stub_token(context_len: int, row: int, adapter: bytes = b"") -> int:
    return (context_len * 31 + row * 7 + zlib.crc32(adapter)) % 251


def compute(seconds: float) -> None:
    """Uses this number of seconds of processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def end_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class StubProfiling(Profiling):
    def stop(self, seq: int) -> ProfileReply:
        """Sleeps while a child of a child analyses the profile, as with MindSpore."""
        if not (child := os.fork()):
            if analysis := os.fork():
                os.waitpid(analysis, 0)
            else:
                compute(ANALYSIS_S)
            os._exit(0)
        os.waitpid(child, 0)
        return super().stop(seq)


class StubRunner:
    def __init__(self, config: Config, report: StartReport, rank: int) -> None:
        self._config = config
        self._report = report
        self.ahead = None
        self.later_pages = LaterPages()
        self.profiling = StubProfiling("stub", rank, lambda replaying: None)
        parallel, replica = config.parallel_config, rank // config.parallel_config.group_size
        self._member = rank - group_ranks(replica, parallel).start
        self._answers = rank == answering_rank(replica, parallel)
        self._adapters: dict[int, bytes] = {}
        self._behaves = config.model_name == "bad-last-agent" and self._member < parallel.group_size - 1

    def load(self) -> None:
        self._report("load weights", 1, 2)
        if self._config.model_name == "fails-to-load":
            raise ValueError("the weights are made of cheese")
        if self._config.model_name == "dies-while-loading":
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._config.model_name == "loads-forever":
            time.sleep(600)
        self._report("load weights", 2, 2)

    def compile(self) -> None:
        self._report("compile", 1, 1)

    def warm_up(self) -> None:
        self._report("warm up", 1, 1)

    def summary(self) -> dict[str, str | int | float]:
        return {"device": "stub", "pid": os.getpid()}

    def run_step(self, slot: StepSlot, *, is_decode: bool) -> StepCost:
        if not is_decode:
            self._misbehave(slot)
        return self._sample(slot)

    def _misbehave(self, slot: StepSlot) -> None:
        tokens = set() if self._behaves else set(slot.token_ids[: slot.num_tokens].tolist())
        if DIE in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISE in tokens:
            raise ZeroDivisionError("something nobody thought of")
        if REFUSE in tokens:
            raise ProtocolError("token 203 is refused")
        if HANG in tokens:
            time.sleep(600)
        if AWAIT in tokens:
            Path(self._config.log_config.path).with_name(AWAITED).open("rb").close()
        if BUSY in tokens:
            compute(0.1)
        if SPIN in tokens:
            compute(600.0)
        if SPIN_CHILD in tokens:
            if not (child := os.fork()):
                end_with_parent()
                compute(600.0)
                os._exit(0)
            os.waitpid(child, 0)
        if COMPILE in tokens:
            self._report("compile", 0, 1)
            compute(COMPILE_S)
        if SLOW in tokens:
            time.sleep(0.2)

    def _sample(self, slot: StepSlot) -> StepCost:
        for index in range(slot.num_seqs * self._answers):
            adapter = int(slot.adapters[index]) if slot.adapters.size else NO_ADAPTER
            content = b"" if adapter == NO_ADAPTER else self._adapters[adapter]
            sampled = stub_token(int(slot.context_lens[index]), int(slot.rows[index]), content)
            slot.sampled_ids[index] = sampled if slot.do_sample[index] else -1
            slot.sampled_logit[index] = sampled / 2
            slot.logsumexp[index] = sampled
            for place in range(int(slot.num_top_logits[index])):
                slot.top_ids[index * 32 + place] = place
                slot.top_logits[index * 32 + place] = -place
        return StepCost(11 + self._member, 22 * self._answers)

    def load_adapter(self, slot: int, name: str, num_bytes: int) -> None:
        content = AdapterMemory.attach(name, num_bytes, np.uint8).read(0, num_bytes)
        if content.startswith(BAD_ADAPTER):
            raise AgentError("the adapter is made of cheese")
        self._adapters[slot] = content

    def run_moves(self, slot: StepSlot) -> StepCost:
        if BAD_BLOCK in slot.moves[1 : 3 * slot.num_moves : 3].tolist() and not self._answers:
            time.sleep(0.2)
            slot.move_faults[slot.moves[1 : 3 * slot.num_moves : 3].tolist().index(BAD_BLOCK)] = 1
        return StepCost(33 * slot.num_moves)

    def reset(self) -> None:
        pass


if __name__ == "__main__":
    sys.exit(run_agent(lambda config, report, rank, exchange: StubRunner(config, report, rank)))
