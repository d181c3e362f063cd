"""Scripts for the scheduler: limits, and a list of operations, as plain data.

Tests draw a script at random, run it, and reduce it while it still fails. An impossible operation does nothing: for
example, ``answer`` without a result. Therefore a script is still valid if operations are removed from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llm_serving.errors import ContextLengthError, QueueFullError
from llm_serving.request import FinishReason
from llm_serving.scheduler.limits import AdmissionKind, BatchingStrategy, Policy, PreemptionKind, SchedulerLimits
from support.fakes import make_limits, make_request
from support.simulation import Simulation

__all__ = ["Operation", "Player", "Script", "make_script_limits", "minimise", "play"]

Operation = tuple[Any, ...]
"""Name and arguments of an operation. The methods of ``Player`` define them."""

_ENUMS = {
    "policy": Policy,
    "batching": BatchingStrategy,
    "preemption": PreemptionKind,
    "admission": AdmissionKind,
}


@dataclass(frozen=True)
class Script:
    """The limits and operations of one run of the scheduler.

    ``limits`` are the arguments of SchedulerLimits. For an enum argument, ``limits`` has the value of the member.
    """

    limits: dict[str, Any]
    operations: list[Operation]

    def to_json(self) -> str:
        return json.dumps({"limits": self.limits, "operations": self.operations})

    @classmethod
    def from_json(cls, text: str) -> Script:
        value = json.loads(text)
        return cls(value["limits"], [tuple(operation) for operation in value["operations"]])


def make_script_limits(values: dict[str, Any]) -> SchedulerLimits:
    return make_limits(**{name: _ENUMS[name](value) if name in _ENUMS else value for name, value in values.items()})


class Player:
    """Runs the operations of a script on a simulation, which checks all invariants after each operation."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self.simulation = Simulation(make_script_limits(limits))

    def do(self, operation: Operation) -> None:
        name, *arguments = operation
        getattr(self, name)(*arguments)

    def add(self, name: str, request: dict[str, Any]) -> None:
        """Adds a request. A refusal is correct only if the request can never be served or if the queue is full."""
        simulation = self.simulation
        if name in simulation.requests:
            return
        fields = dict(request)
        prompt, max_tokens = fields.pop("prompt"), fields.pop("max_tokens")
        urgency = {key: fields.pop(key) for key in _URGENCY if key in fields}
        fields["stop_token_ids"] = frozenset(fields.get("stop_token_ids", ()))
        new = make_request(name, prompt, max_tokens, arrival=simulation.now, **fields)
        new.priority = urgency.get("priority", 0)
        new.tenant = urgency.get("tenant", "")
        new.cache_salt = urgency.get("cache_salt", "").encode()
        new.ttft_objective = urgency.get("ttft_objective")
        new.tbt_objective = urgency.get("tbt_objective")
        if urgency.get("deadline") is not None:
            new.deadline = simulation.now + urgency["deadline"]
        try:
            simulation.add(new)
        except ContextLengthError:
            assert not _can_be_served(simulation.limits, len(prompt), max_tokens)
            simulation.seen["refused for good"] += 1
        except QueueFullError:
            assert simulation.scheduler.figures.waiting > 0 or simulation.limits.max_waiting_tokens is not None
            simulation.seen["refused for now"] += 1
        else:
            assert _can_be_served(simulation.limits, len(prompt), max_tokens)
        simulation.check()

    def schedule(self) -> None:
        self.simulation.schedule()

    def run(self, times: int) -> None:
        for _ in range(times):
            self.simulation.run()

    def begin(self) -> None:
        """Makes the device begin its next step. From then on, no queued step can run before this step."""
        self.simulation.device.begin()

    def answer(self, times: int) -> None:
        for _ in range(min(times, len(self.simulation.answers))):
            self.simulation.answer()

    def rounds(self, number: int) -> None:
        """Repeats ``number`` times: schedules all possible steps, then runs and completes them."""
        simulation = self.simulation
        for _ in range(number):
            simulation.schedule()
            while simulation.answers or simulation.device.queue:
                simulation.answer()

    def go_on(self, steps: int) -> None:
        simulation = self.simulation
        for _ in range(steps):
            simulation.schedule()
            if simulation.answers or simulation.device.queue:
                simulation.answer()

    def wait(self, seconds: float) -> None:
        self.simulation.now += seconds

    def end(self, name: str, reason: str, drop: bool) -> None:
        """Ends a request on behalf of its client. With ``drop``, also drops the steps that have become void."""
        if name in self.simulation.requests:
            self.simulation.end(name, FinishReason(reason))
        if drop:
            self.drop()

    def drop(self) -> None:
        self.simulation.drop_void_steps()

    def fail(self) -> None:
        if self.simulation.device.queue:
            self.simulation.fail_step("the step failed")

    def skip(self) -> None:
        if self.simulation.device.queue:
            self.simulation.skip_step()

    def fail_all(self) -> None:
        self.simulation.fail_all()

    def lose(self) -> None:
        self.simulation.lose_agent()

    def finish(self) -> None:
        self.simulation.finish(max_steps=20_000)


_URGENCY = ("priority", "tenant", "cache_salt", "ttft_objective", "tbt_objective", "deadline")


def _can_be_served(limits: SchedulerLimits, prompt: int, max_tokens: int) -> bool:
    cached = prompt + min(max_tokens, limits.max_model_len - prompt) - 1
    return (
        prompt <= limits.max_prompt_len
        and prompt < limits.max_model_len
        and cached <= (limits.num_blocks - 1) * limits.block_size
    )


def play(script: Script, drafts: int | None = None, *, checks_texts: bool = True) -> Simulation:
    """Runs a script until all its requests have ended. Raises AssertionError if a check fails.

    ``drafts`` is the seed of random drafts, which are offered before each step. If it is None, no drafts are offered.
    If ``checks_texts`` is False, a wrong text is no failure, so that the caller can count the wrong texts.
    """
    player = Player(script.limits)
    player.simulation.checks_texts = checks_texts
    player.simulation.drafts = None if drafts is None else random.Random(drafts)
    for operation in script.operations:
        player.do(operation)
    player.finish()
    return player.simulation


def minimise(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Returns a small script that still fails (delta debugging, Zeller and Hildebrandt 2002).

    No operation can be removed from this script. Its requests and limits are as simple as possible.
    """
    while True:
        smaller = _leave_out(script, fails)
        for candidate in _plainer(smaller):
            if fails(candidate):
                smaller = candidate
                break
        if smaller == script:
            return script
        script = smaller


def _leave_out(script: Script, fails: Callable[[Script], bool]) -> Script:
    size = max(1, len(script.operations) // 2)
    while True:
        start, left_out = 0, False
        while start < len(script.operations):
            rest = script.operations[:start] + script.operations[start + size :]
            if fails(replace(script, operations=rest)):
                script, left_out = replace(script, operations=rest), True
            else:
                start += size
        if size == 1 and not left_out:
            return script
        size = max(1, size // 2)


_PLAIN_LIMITS: dict[str, Any] = {
    "batching": "continuous",
    "policy": "fcfs",
    "preemption": "recompute",
    "admission": "none",
    "page_attention": True,
    "prefix_cache": False,
    "num_host_blocks": 0,
    "chunk_tokens": None,
    "decode_steps_ahead": 0,
    "batch_waiting_time": 0.0,
    "decode_batch_waiting_time": 0.0,
    "predict_output_length": False,
    "max_total_tokens": None,
    "fairness": False,
}


def _plainer(script: Script) -> Iterator[Script]:
    for name, value in _PLAIN_LIMITS.items():
        if script.limits.get(name, value) != value:
            yield replace(script, limits={**script.limits, name: value})
    for place, operation in enumerate(script.operations):
        for other in _plainer_operations(operation):
            yield replace(script, operations=[*script.operations[:place], other, *script.operations[place + 1 :]])


def _plainer_operations(operation: Operation) -> Iterator[Operation]:
    if operation[0] == "add":
        _, name, request = operation
        for key in request.keys() - {"prompt", "max_tokens"}:
            yield "add", name, {k: v for k, v in request.items() if k != key}
        if len(request["prompt"]) > 1:
            yield "add", name, {**request, "prompt": request["prompt"][:-1]}
        if request["max_tokens"] > 1:
            yield "add", name, {**request, "max_tokens": request["max_tokens"] - 1}
    elif operation[0] in ("go_on", "rounds", "run", "answer") and operation[1] > 1:
        yield operation[0], operation[1] - 1
