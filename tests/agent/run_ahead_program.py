"""Runs the same steps with and without running ahead, in an agent's worker, and prints the results as JSON.

test_run_ahead.py starts it in a separate process. All parts run with one pair of models, in the given order. The
weights are written to the working directory.

python tests/agent/run_ahead_program.py [greedy] [mixed] [drawn] [captured] [failing] | adapters
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "agent", "lora"))]

from adapted_driver import load_adapter  # noqa: E402
from step_driver import Move, Part, StepDriver, blocks_for  # noqa: E402

from agent.backends.runtime import start_runtime  # noqa: E402
from agent.kernels.library import OperatorRefusedError  # noqa: E402
from agent.model_runner import ModelRunner  # noqa: E402
from agent.run_ahead.odds import DrawOdds  # noqa: E402
from agent.task_queue import TaskQueue  # noqa: E402
from agent.worker import Worker  # noqa: E402
from llm_serving.config import Config  # noqa: E402
from llm_serving.ipc.messages import Decode, Prefill, Shutdown  # noqa: E402
from llm_serving.ipc.shm import LAST_TOKEN, NO_ADAPTER, MoveKind, StepSlot  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import VARIANTS  # noqa: E402
from support.agent_group import with_layers  # noqa: E402
from support.lora_folders import random_adapter  # noqa: E402
from support.step_config import make_config  # noqa: E402

MODEL = "llama3_rope"
"""One layer of this model runs, because MindSpore compiles its graphs many times."""
GREEDY = {"num_top_logits": -1}
IN_FLIGHT = 2
ROWS, PROMPT, ROUNDS = 6, 9, 14
RANDOM_RUNS = 3


class Step:
    """One step of the plan: the parts of sequences that it computes, and its block moves."""

    def __init__(self, kind: Any, parts: list[Part], moves: tuple[Move, ...] = ()) -> None:
        self.kind, self.parts, self.moves = kind, parts, moves


class Parts:
    """Sequences with random prompts. A call returns the next part of a sequence.

    This part is the next ``count`` tokens of its prompt (None: all of them), or its next output token.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        sampling: Callable[[int], dict[str, float]],
        adapters: tuple[int, ...] = (NO_ADAPTER,) * ROWS,
    ) -> None:
        self._settings, self._adapters = {row: sampling(row) for row in range(ROWS)}, adapters
        self._prompts = {row: rng.integers(3, 200, PROMPT + row).tolist() for row in range(ROWS)}
        self._known = dict.fromkeys(range(ROWS), 0)

    def __call__(self, row: int, count: int | None = None) -> Part:
        start, prompt, sampling = self._known[row], self._prompts[row], self._settings[row]
        tokens = prompt[start : start + (count or len(prompt))] if start < len(prompt) else [LAST_TOKEN]
        known = self._known[row] = start + len(tokens)
        samples, output = known >= len(prompt), known - len(prompt)
        starts = output == 0 and sampling.get("repetition_penalty", 1.0) != 1.0
        history = prompt if starts else ()
        blocks, adapter = blocks_for(row, 64), self._adapters[row]
        return Part(tokens, start, blocks, row, samples, output, history, len(history), sampling, adapter)


def plan(
    sampling: Callable[[int], dict[str, float]],
    *,
    moves: bool = False,
    adapters: tuple[int, ...] = (NO_ADAPTER,) * ROWS,
) -> Iterator[Step]:
    """Yields steps of several sequences: whole prompts, chunks, decodes of some of the sequences, and mixed steps.

    ``adapters`` has the adapter slot of each batch row. Only prompts are sent as token ids. Every later input is
    LAST_TOKEN, which the agent replaces by the sampled token.
    """
    rng = np.random.default_rng(7)
    part = Parts(rng, sampling, adapters)
    yield Step(Prefill, [part(0), part(1)])
    yield Step(Decode, [part(0), part(1)])
    yield Step(Prefill, [part(2), part(3, 4)])
    yield Step(Prefill, [part(0), part(3), part(1)])
    for number in range(ROUNDS):
        rows = [row for row in range(4) if rng.random() < 0.8] or [0]
        copies = ((MoveKind.COPY, 1, 200), (MoveKind.COPY, 200, 1)) if moves and number % 4 == 3 else ()
        yield Step(Decode, [part(row) for row in rng.permutation(rows).tolist()], copies)
    yield Step(Prefill, [part(4), part(5)])
    for _ in range(4):
        yield Step(Decode, [part(row) for row in range(ROWS)])


def alternating_plan() -> list[Step]:
    """Returns decode steps of two sequences. In every second step, sampling one sequence needs whole logits."""
    part = Parts(np.random.default_rng(8), lambda row: GREEDY | ({"repetition_penalty": 1.3} if row == 2 else {}))
    steps = [Step(Prefill, [part(0), part(1)]), Step(Prefill, [part(2)])]
    return steps + [Step(Decode, [part(0), part(1 + number % 2)]) for number in range(ROUNDS)]


def run_steps(
    driver: StepDriver, steps: list[Step], spoil: int = -1, in_flight: int = IN_FLIGHT, unsampled: int = -1
) -> dict[str, Any]:
    """Sends the steps to a worker, at most ``in_flight`` at a time.

    Returns the results of the steps, the order of events, and the exit code of the worker. A step without a result has
    None. Step number ``spoil`` refers to a block that does not exist, so that it fails. In step number ``unsampled``,
    the last sequence has a token mask that the slot does not contain, so that sampling fails.
    """
    slots, results, events = [], {}, []
    for step in steps:
        driver.slot = StepSlot(driver.slot.layout, bytearray(driver.slot.layout.slot_bytes))
        slots.append(driver.fill(step.parts, step.moves))
    for number, slot in enumerate(slots):
        slot.header[1] = number
    if spoil >= 0:
        slots[spoil].block_tables[0] = slots[spoil].slot_mapping[0] = 2**27
    if unsampled >= 0:
        slots[unsampled].mask_number[len(steps[unsampled].parts) - 1] = 1
    queue = TaskQueue("fcfs", max_steps=IN_FLIGHT)
    waiting = iter(range(len(steps)))

    def send_next() -> None:
        number = next(waiting, None)
        if number is not None:
            queue.put(steps[number].kind(seq=number, slot=number))
        elif len(results) == len(steps):
            queue.put(Shutdown(seq=len(steps)))

    def answered(message: Any) -> None:
        slot, seqs = slots[message.seq], len(steps[message.seq].parts)
        names = ("sampled_ids", "sampled_logit", "logsumexp")
        bits = b"".join(getattr(slot, name)[:seqs].tobytes() for name in names)
        tokens = dict(zip(slot.rows[:seqs].tolist(), slot.sampled_ids[:seqs].tolist(), strict=True))
        error = getattr(message, "error", "")
        digest = hashlib.sha256(bits).hexdigest()
        results[message.seq] = {
            "error": error.split(" its inputs")[0], "tokens": tokens, "digest": digest,
            "fetched": getattr(message, "fetched_bytes", 0),
            "only_sampling": getattr(message, "only_sampling", False),
            "draws": [getattr(message, name, 0) for name in ("device_draws", "wrong_draws", "second_launches")],
        }  # fmt: skip
        events.append(f"done {message.seq}")
        send_next()

    runner = driver.runner
    if runner.ahead is not None:
        launch = runner._graph.run

        def noted(*arguments: Any) -> Any:
            scores = launch(*arguments)
            events.append(f"launched {sum(event.startswith('launched') for event in events)}")
            return scores

        runner._graph.run = noted
    runner.reset()
    worker = Worker(lambda report: runner, queue, SimpleNamespace(send=answered), {})  # type: ignore[arg-type]
    for _ in range(in_flight):
        send_next()
    code = worker._serve(SimpleNamespace(slots=slots), runner)  # type: ignore[arg-type]
    if runner.ahead is not None:
        del runner._graph.run
    return {"results": [results.get(number) for number in range(len(steps))], "events": events, "code": code}


def random_sampling(row: int) -> dict[str, float]:
    """Returns sampling parameters: greedy with and without log-probabilities, random, or with a penalty."""
    drawn = {"temperature": 0.8, "top_k": 30, "seed": 11 + row}
    kinds: list[dict[str, float]] = [{}, {"num_top_logits": 2}, drawn, {"repetition_penalty": 1.3}, {}, drawn]
    return GREEDY | kinds[row]


def drawn_sampling(row: int) -> dict[str, float]:
    """Returns sampling parameters: greedy, or a token that a device can draw among its candidates."""
    drawn = {"temperature": 0.8, "top_k": 30, "seed": 21 + row}
    kinds: list[dict[str, float]] = [
        *(drawn, {}, drawn | {"top_p": 0.8, "num_top_logits": 2}),
        *({"num_top_logits": 2}, drawn | {"temperature": 1.5, "top_k": 64, "min_p": 0.05}, drawn | {"top_k": 1}),
    ]
    return GREEDY | kinds[row]


def large_top_k_sampling(row: int) -> dict[str, float]:
    """Returns sampling parameters like ``drawn_sampling``, but batch row 1 has more tokens than a device ranks."""
    return drawn_sampling(row) | ({"temperature": 0.8, "top_k": 65, "seed": 22} if row == 1 else {})


def whole_sampling(row: int) -> dict[str, float]:
    """Returns sampling parameters: greedy, or with a temperature and without ``top_k``."""
    drawn = {"temperature": 2.0, "seed": 31 + row}
    kinds: list[dict[str, float]] = [drawn, {}, drawn | {"top_p": 0.9}, drawn | {"min_p": 0.05}, drawn, {}]
    return GREEDY | kinds[row]


def pair(config: Config) -> tuple[StepDriver, StepDriver]:
    """Returns two drivers of the same model.

    The second runs on an artificial device, which finishes a step after 1 ms.
    """
    from performance.artificial_device.ops import use_artificial_device
    from performance.artificial_device.queue import ArtificialDevice

    plain = StepDriver(config)
    use_artificial_device(ArtificialDevice(device_s=0.001))
    return plain, StepDriver(config)


Pair = tuple[StepDriver, StepDriver]


def run_both(drivers: Pair, steps: list[Step], spoil: int = -1) -> dict[str, Any]:
    """Runs the steps with both drivers. Returns both results, and the events of the driver that runs ahead."""
    plain, ahead = (run_steps(driver, steps, spoil) for driver in drivers)
    assert plain["code"] == ahead["code"] == 0, "the worker must end after Shutdown only"
    return {"plain": plain["results"], "ahead": ahead["results"], "events": ahead["events"]}


def run_failing(drivers: Pair) -> dict[str, Any]:
    for driver in drivers:
        reader = driver.runner._reader if driver.runner.ahead is None else driver.runner.ahead._reader
        reader._num_blocks *= 2**20  # the reader then accepts numbers of blocks that do not exist
    found = run_both(drivers, greedy_plan(), spoil=8)
    with failing_moves(drivers[0].runner), failing_moves(drivers[1].runner):
        return found | {"moved": run_both(drivers, list(plan(lambda row: GREEDY, moves=True)))}


@contextmanager
def failing_moves(runner: ModelRunner) -> Iterator[None]:
    """Lets the device of a runner fail the first block moves."""
    model = runner._model
    assert model is not None
    run = model.moves.run

    def fail(moves: Any) -> None:
        model.moves.run = run  # type: ignore[method-assign]
        raise OperatorRefusedError("the copy engine is broken")

    model.moves.run = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.moves.run = run  # type: ignore[method-assign]


def run_captured(drivers: Pair) -> dict[str, Any]:
    """Runs decodes, some of them with a sequence whose sampling needs whole logits.

    The driver that runs ahead pads the decodes, and uses a device on which every launch writes its results to the same
    memory. The other driver has no device queue and pads nothing.
    """
    pad(drivers[1])
    device = device_of(drivers[1])
    device.captures = True
    plans = {"greedy": greedy_plan(), "alternating": alternating_plan(), "drawn": list(plan(drawn_sampling))}
    found = {name: run_both(drivers, steps) for name, steps in plans.items()}
    device.captures = False
    return found


def greedy_plan() -> list[Step]:
    return list(plan(lambda row: GREEDY))


def mixed_plan() -> list[Step]:
    return list(plan(random_sampling, moves=True))


def pad(driver: StepDriver) -> None:
    """Replaces the runner's graphs by graphs that pad decodes to 2, 4 or 8 sequences.

    An Ascend does the same if it captures the launches of decodes in these sizes.
    """
    from agent.step_graph.making import make_step_graph

    runner, config = driver.runner, driver.config
    model = runner._model
    runner._graph = make_step_graph(
        model.network, model.ops, runner._reader.buffers, config.slot_limits(), config.max_prefill_seqs,
        config.shape.vocab_size, (2, 4, 8),
    )  # fmt: skip
    runner._graph.compile()


ADAPTERS = (NO_ADAPTER, 1, 0, NO_ADAPTER, 1, 0)
"""The adapter slot of each batch row."""


def run_adapted(drivers: Pair) -> dict[str, Any]:
    """Runs sequences with two LoRA adapters and without one, and then the same sequences without adapters."""
    for driver in drivers:
        for slot in range(2):
            folder = random_adapter(Path.cwd() / f"adapter{slot}", driver.config.shape, seed=slot, rank=4 + 4 * slot)
            load_adapter(driver, folder, slot)
    adapted = run_both(drivers, list(plan(random_sampling, adapters=ADAPTERS)))
    return adapted | {"without": run_steps(drivers[0], list(plan(random_sampling)))["results"]}


def run_drawn(drivers: Pair) -> dict[str, Any]:
    """Runs greedy sequences and sequences with a temperature. In the second run, some draws of the device are wrong."""
    device, steps = device_of(drivers[1]), list(plan(drawn_sampling))
    device.are_wrong.clear()
    right = run_both(drivers, steps) | {"draws": list(device.are_wrong)}
    device.are_wrong.clear()
    device.wrong_every = 3
    wrong = run_steps(drivers[1], steps)
    device.wrong_every = 0
    found = {"ahead": wrong["results"], "events": wrong["events"], "draws": list(device.are_wrong)}
    large = run_both(drivers, list(plan(large_top_k_sampling)))
    refused = run_refused(drivers[1], steps)
    return {"right": right, "wrong": found, "refused": refused, "large top_k": large} | run_whole(drivers)


def run_refused(driver: StepDriver, steps: list[Step]) -> dict[str, Any]:
    """Runs steps of which some are launched again. The first of these second launches fails."""
    device, ahead = device_of(driver), driver.runner.ahead
    assert ahead is not None
    launch, launch_again = ahead._launch, ahead._launch_again

    def refused(*arguments: Any) -> Any:
        raise OperatorRefusedError("the second launch was refused")

    def launch_again_refused(inputs: Any) -> None:
        ahead._launch, ahead._launch_again = refused, launch_again  # type: ignore[method-assign]
        launch_again(inputs)
        ahead._launch = launch  # type: ignore[method-assign]

    ahead._launch_again = launch_again_refused  # type: ignore[method-assign]
    device.wrong_every = 3
    found = run_steps(driver, steps)
    device.wrong_every = 0
    return found


def run_whole(drivers: Pair) -> dict[str, Any]:
    """Runs sequences without ``top_k``, many of whose tokens are none of the device's candidates.

    In the first run, the device draws in every step. In the runs ``sometimes``, it draws in a random part of all
    launches, and half of its draws are wrong. So it may draw in the first launch of a step, and not in the second one.
    """
    steps = list(plan(whole_sampling))
    with draws_allowed(1):
        found: dict[str, Any] = {"whole": run_both(drivers, steps), "sometimes": []}
    device_of(drivers[1]).wrong_every = 2
    for seed in range(RANDOM_RUNS):
        with draws_allowed(0.6, seed):
            found["sometimes"].append(run_steps(drivers[1], steps))
    device_of(drivers[1]).wrong_every = 0
    return found


@contextmanager
def draws_allowed(share: float, seed: int = 0) -> Iterator[None]:
    """Lets the device draw tokens without ``top_k`` in a random part of all launches. ``share`` is the size of this
    part, at most 1.
    """
    estimated, choice = DrawOdds.allow, random.Random(seed)
    DrawOdds.allow = lambda self, num_seqs: choice.random() < share  # type: ignore[method-assign]
    try:
        yield
    finally:
        DrawOdds.allow = estimated  # type: ignore[method-assign]


def device_of(driver: StepDriver) -> Any:
    """Returns the artificial device of a driver."""
    from performance.artificial_device.ops import ArtificialHooks

    hooks = driver.runner._model.ops.hooks  # type: ignore[union-attr]
    assert isinstance(hooks, ArtificialHooks)
    return hooks.device


PARTS: dict[str, Callable[[Pair], dict[str, Any]]] = {
    "greedy": lambda drivers: run_both(drivers, greedy_plan()),
    "mixed": lambda drivers: run_both(drivers, mixed_plan()),
    "drawn": run_drawn,
    "captured": run_captured,
    "failing": run_failing,
    "adapters": run_adapted,
}

if __name__ == "__main__":
    write_model(with_layers(VARIANTS[MODEL], 1), Path.cwd() / MODEL)
    adapted = {"lora_config.max_adapters": 2, "lora_config.max_rank": 8} if "adapters" in sys.argv else {}
    config = make_config(Path.cwd() / MODEL, "bfloat16", "native", extra=adapted)
    start_runtime(config)
    drivers = pair(config)
    print(json.dumps({part: PARTS[part](drivers) for part in sys.argv[1:]}))
