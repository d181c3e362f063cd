"""Records and replays graphs of native primitives. Other graphs must not be recorded. Prints the results as JSON.

test_launches.py starts this program in its own process, because MindSpore reads the plugin when it is imported.
"""

from __future__ import annotations

import json
import os
from typing import Any

from agent.kernels.library import hold_failures, library_path, take_failure

os.environ["MS_OP_PLUGIN_PATH"] = str(library_path())

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import auto_generate

from agent.kernels.launches import (
    RecordedLaunches,
    RecordingError,
    Results,
    Run,
    StepSizes,
    record,
    record_any_size,
    recordings_bytes,
)
from agent.step_graph.replay.native import NativeReplays
from agent.step_inputs import StepInputs
from llm_serving.ipc.shm import SlotLimits

ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
ms.set_device("CPU")

RNG = np.random.default_rng(0)
ROWS, WIDTH, TOKENS = 3, 32, 16
RESULTS: dict[str, Any] = {}

Array = np.ndarray[Any, Any]


class Layer(nn.Cell):
    """Takes one row of a table for each token, applies a norm, and multiplies by a weight.

    ``between`` is an operator between the norm and the product.
    """

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.table, self.gamma, self.weight = (
            Parameter(floats(*sizes)) for sizes in ((TOKENS, WIDTH), (WIDTH,), (8, WIDTH))
        )
        self.gather, self.norm, self.multiply = ops.Gather(), auto_generate.RmsNorm(1e-5), ops.MatMul(transpose_b=True)
        self.between = between

    def construct(self, ids: Tensor) -> Tensor:
        rows = self.norm(self.gather(self.table, ids, 0), self.gamma)[0]
        if self.between is not None:
            rows = self.between(rows)
        return self.multiply(rows, self.weight)


class WithConstant(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.constant, self.add = floats(WIDTH), ops.Add()

    def construct(self, rows: Tensor) -> Tensor:
        return self.add(rows, self.constant)


class Pairs(Layer):
    """A ``Layer`` whose table has a row for two tokens. The table is larger than all other arrays together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Parameter(floats(1 << 15, 2 * WIDTH))
        self.reshape = ops.Reshape()

    def construct(self, ids: Tensor) -> Tensor:
        table = self.reshape(self.table, (-1, WIDTH))
        return self.multiply(self.norm(self.gather(table, ids, 0), self.gamma)[0], self.weight)


class WritesBetween(nn.Cell):
    """Reshapes a cache, writes a row of a table for each token to the cache, and then reads these rows again.

    The result has the rows before the write, because a Reshape returns other memory. With ``writes_copy``, the
    launch writes to the result of the Reshape instead of the cache. Then the result has the rows after the write.
    """

    def __init__(self, *, writes_copy: bool) -> None:
        super().__init__()
        of_cache, self.of_copy = ((TOKENS, WIDTH), (TOKENS, 1, 1, WIDTH))[:: 1 if writes_copy else -1]
        self.cache, self.table = (Parameter(floats(*sizes).half()) for sizes in (of_cache, (TOKENS, WIDTH)))
        self.gather, self.reshape, self.write = ops.Gather(), ops.Reshape(), auto_generate.ReshapeAndCache()
        self.writes_copy = writes_copy

    def construct(self, ids: Tensor) -> Tensor:
        copy = self.reshape(self.cache, self.of_copy)
        rows = self.gather(self.table, ops.depend(ids, copy), 0)  # depend gives the launches one order
        written = self.write(rows, None, copy if self.writes_copy else self.cache, None, ids)
        return self.gather(ops.depend(copy, written), ids, 0)


class Graph:
    """A compiled Cell. The memory of its inputs stays at the same address."""

    def __init__(self, cell: nn.Cell, rows: int = ROWS) -> None:
        self.ids = np.zeros(rows, np.int32)
        self.cell = cell
        self.run()

    def run(self) -> tuple[Results, tuple[int, ...]]:
        found = self.cell(Tensor.from_numpy(self.ids))
        tensors = found if isinstance(found, tuple) else (found,)
        return tuple(tensor.asnumpy() for tensor in tensors), tuple(tensor.data_ptr() for tensor in tensors)

    def result(self) -> Array:
        """Runs the graph and returns its first result."""
        return self.run()[0][0]

    def memory(self) -> list[tuple[int, int]]:
        parameters = [(each.data_ptr(), each.nbytes) for each in self.cell.get_parameters()]
        return [*parameters, (self.ids.ctypes.data, self.ids.nbytes)]

    def record(self, run: Run | None = None) -> tuple[Array, RecordedLaunches]:
        """Returns the first result of a run, and the recorded launches."""
        results, launches = record(run or self.run, self.memory())
        return results[0], launches


def floats(*sizes: int) -> Tensor:
    return Tensor(RNG.standard_normal(sizes).astype(np.float32))


def refusal(graph: Graph, run: Run | None = None) -> RecordingError | None:
    try:
        graph.record(run)
    except RecordingError as error:
        return error
    return None


def check_replays() -> None:
    graph = Graph(Layer())
    graph.ids[:] = 1, 2, 3
    result, launches = graph.record()
    RESULTS["what is recorded is what the graph gives"] = bool((result == graph.result()).all())
    graph.ids[:] = 9, 0, 15
    replayed = launches.run()[0].copy()
    RESULTS["a replay sees the inputs of now"] = replayed.tobytes() == graph.result().tobytes() != result.tobytes()
    weight = graph.cell.weight.asnumpy()
    weight *= 2
    doubled = launches.run()[0].copy()
    RESULTS["a replay sees the parameters of now"] = bool((doubled == 2 * replayed).all())
    other = Graph(Layer())
    _, others = other.record()
    RESULTS["recordings do not disturb each other"] = (
        launches.run()[0].tobytes() == doubled.tobytes() and others.run()[0].tobytes() == other.result().tobytes()
    )
    launches.close()
    launches.close()
    RESULTS["one outlives the other"] = others.run()[0].tobytes() == other.result().tobytes()


class TwoResults(Layer):
    """A ``Layer`` with three more results: the rows after the norm, each row's largest element, and its index."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = ops.ArgMaxWithValue(axis=-1)

    def construct(self, ids: Tensor) -> tuple[Tensor, ...]:
        rows = self.norm(self.gather(self.table, ids, 0), self.gamma)[0]
        return self.multiply(rows, self.weight), rows, *self.largest(rows)


def check_several_results() -> None:
    graph = Graph(TwoResults())
    graph.ids[:] = 1, 2, 3
    _, launches = graph.record()
    graph.ids[:] = 4, 0, 9
    replayed = [array.copy() for array in launches.run()]
    wanted = graph.run()[0]
    RESULTS["all results of a graph are replayed"] = len(wanted) == 4 and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(replayed, wanted, strict=True)
    )


def check_what_is_not_recorded() -> None:
    of_mindspore = refusal(Graph(Layer(ops.Sin())))
    assert of_mindspore is not None
    unknown = "MatMul reads what none of our kernels wrote, as its argument 0"
    # The operator in the middle is MindSpore's own. It may write its result to memory that one of our kernels wrote
    # before. Then its absence shows only in the results of a replay.
    wrong = "a replay gives another result"
    RESULTS["a kernel of MindSpore's between ours"] = of_mindspore.is_for_good and (
        unknown in str(of_mindspore) or wrong in str(of_mindspore)
    )
    graph = Graph(Layer(), rows=1)
    try:
        record(graph.run, graph.memory()[:-1])
    except RecordingError as unnamed:
        RESULTS["an input that is not named"] = "Gather reads what none of our kernels wrote, as its argument 1" in str(
            unnamed
        )
    graph = Graph(Layer(ops.Sin()))
    graph.ids[:] = 3, 4, 5
    error = refusal(graph)
    assert error is not None
    RESULTS["the graph's result comes with the error"] = error.results[0].tobytes() == graph.result().tobytes()
    graph = Graph(Layer(WithConstant()))
    unnamed_constant = refusal(graph)
    RESULTS["a constant that is not named"] = "Add reads what none of our kernels wrote" in str(unnamed_constant)
    constant = graph.cell.between.constant
    named = [*graph.memory(), (constant.data_ptr(), constant.nbytes)]
    RESULTS["a constant that is named"] = record(graph.run, named)[1].run()[0].tobytes() == graph.result().tobytes()
    graph = Graph(Layer())
    error = refusal(graph, lambda: (graph.run()[0], (graph.ids.ctypes.data,)))
    RESULTS["a result that is no operator's"] = str(error) == "none of our kernels wrote the result"

    def falsified() -> tuple[Results, tuple[int, ...]]:
        results, addresses = graph.run()
        falsified.keep = results  # type: ignore[attr-defined]  # else the address is another result's
        return (results[0] + 1,), addresses

    RESULTS["a replay that differs"] = str(refusal(graph, falsified)) == "a replay gives another result"
    RESULTS["no launch at all"] = str(refusal(graph, lambda: ((np.zeros(1),), (0,)))) == "nothing was launched"


def check_agreement() -> None:
    """Agents that run a graph together replay it only if all agree on two questions.

    The first question is whether each agent has a recording. The second is whether its replay gives the bits of the
    graph.
    """
    for answers, reason in (([False], "another agent cannot replay its launches"), ([True, False], "a replay gives")):
        asked: list[bool] = []

        def all_agree(says_so: bool, answers: list[bool] = answers, asked: list[bool] = asked) -> bool:
            asked.append(says_so)
            return answers[len(asked) - 1]

        graph = Graph(Layer())
        try:
            record(graph.run, graph.memory(), all_agree)
        except RecordingError as error:
            RESULTS[f"others say {answers}"] = (
                reason in str(error)
                and error.is_for_good
                and asked == [True] * len(answers)
                and error.results[0].tobytes() == graph.result().tobytes()
            )


def check_refusals() -> None:
    graph = Graph(Layer())
    hold_failures(True)
    graph.ids[1] = TOKENS
    error = refusal(graph)
    assert error is not None
    RESULTS["refused while recorded"] = not error.is_for_good and take_failure() == "Gather"
    graph.ids[1] = 0
    _, launches = graph.record()
    graph.ids[1] = TOKENS
    launches.run()
    RESULTS["refused at a replay"] = take_failure() == "Gather"
    graph.ids[1] = 7
    RESULTS["a replay after a refusal"] = launches.run()[0].tobytes() == graph.result().tobytes()
    hold_failures(False)

    def raising() -> tuple[Results, tuple[int, ...]]:
        graph.run()
        raise KeyError

    try:
        graph.record(raising)
    except KeyError:
        RESULTS["what the run raises"] = graph.record()[1].run()[0].tobytes() == graph.result().tobytes()


def of_any_size(*cells: nn.Cell, sizes: tuple[StepSizes, StepSizes]) -> tuple[RecordedLaunches | None, str]:
    """Records launches for steps of any size from two steps with the given ``sizes``.

    The first cell runs the first step, which has 2 rows. The last cell runs the second step, which has 3 rows. Returns
    the launches if their replays give the same results, and otherwise the reason.
    """
    ids = np.zeros(TOKENS, np.int32)

    def run(cell: nn.Cell, rows: int) -> tuple[Results, tuple[int, ...]]:
        tensor = cell(Tensor.from_numpy(ids[:rows]))
        return (tensor.asnumpy(),), (tensor.data_ptr(),)

    memory = [(each.data_ptr(), each.nbytes) for cell in cells for each in cell.get_parameters()]
    runs = {sizes[0]: lambda: run(cells[0], 2), sizes[1]: lambda: run(cells[-1], 3)}
    try:
        launches = record_any_size(runs, StepSizes(TOKENS, TOKENS), [*memory, (ids.ctypes.data, ids.nbytes)])
    except RecordingError as error:
        return None, str(error)
    ids[:] = RNG.permutation(TOKENS)
    for rows in (1, TOKENS, 5, 1):
        launches.resize(StepSizes(rows, rows))
        launches.spoil()
        if launches.run()[0].tobytes() != run(cells[0], rows)[0][0].tobytes():
            return launches, f"{rows} rows differ"
    return launches, ""


def check_sizes() -> None:
    tokens, seqs = (StepSizes(2, 1), StepSizes(3, 1)), (StepSizes(5, 2), StepSizes(7, 3))
    RESULTS["steps of any number of tokens"] = of_any_size(Layer(), sizes=tokens)[1] == ""
    RESULTS["steps of any number of sequences"] = of_any_size(Layer(), sizes=seqs)[1] == ""
    wrong = of_any_size(Layer(), sizes=(StepSizes(5, 1), StepSizes(7, 2)))[1]
    RESULTS["a length that is neither"] = "Gather has a length of 2 in one step and of 3 in another" in wrong
    other = of_any_size(Layer(), Layer(), sizes=tokens)[1]
    RESULTS["other parameters in the other step"] = "Gather is another launch in steps of other sizes" in other
    longer = of_any_size(Layer(), Layer(auto_generate.SiLU()), sizes=tokens)[1]
    RESULTS["more launches in the other step"] = "steps of other sizes launch something else" in longer


def check_reshapes() -> None:
    """A replay skips the Reshape of a parameter, unless a launch writes to the parameter or to the Reshape's result."""
    graph = Graph(Pairs())
    _, launches = graph.record()
    graph.ids[:] = 65535, 7, 300
    RESULTS["the readers of a Reshape read the parameter"] = launches.run()[0].tobytes() == graph.result().tobytes()
    RESULTS["a replay does not copy a parameter"] = recordings_bytes() < graph.cell.table.nbytes
    for writes_copy in (False, True):
        cell, ids = WritesBetween(writes_copy=writes_copy), np.arange(TOKENS, dtype=np.int32)

        def run(rows: int, cell: nn.Cell = cell, ids: Array = ids) -> tuple[Results, tuple[int, ...]]:
            found = cell(Tensor.from_numpy(ids[:rows]))
            return (found.asnumpy(),), (found.data_ptr(),)

        run(2)  # MindSpore chooses the addresses of parameters in the first run
        cache, memory = cell.cache.asnumpy(), [(each.data_ptr(), each.nbytes) for each in cell.get_parameters()]
        runs = {StepSizes(rows, 1): lambda rows=rows: run(rows) for rows in (2, 3)}
        launches = record_any_size(runs, StepSizes(TOKENS, 1), [*memory, (ids.ctypes.data, ids.nbytes)])
        launches.resize(StepSizes(5, 1))
        found = []
        for replays in (False, True):
            cache[...] = 7
            rows = (launches.run() if replays else run(5)[0])[0]
            found.append((rows.reshape(5, WIDTH).copy(), cache.copy()))
        (rows, left), (replayed, left_by_replay) = found
        kept, written = (left, rows) if writes_copy else (rows, left[:5])
        assert (kept == 7).all(), "the graph writes to one of the two"
        assert (written.reshape(5, WIDTH) == cell.table.asnumpy()[:5]).all(), "the graph writes to the other one"
        what = "result of a Reshape" if writes_copy else "parameter after its Reshape"
        RESULTS[f"a launch that writes to the {what}"] = (
            replayed.tobytes() == rows.tobytes() and left_by_replay.tobytes() == left.tobytes()
        )


def check_confirmation() -> None:
    """Runs decodes by ``NativeReplays``.

    The first two decodes are recorded. The next two run both the graph and the replay, which must agree.
    """

    def decodes(*cells: nn.Cell) -> tuple[NativeReplays, bool, int]:
        """Records two steps of the first cell, then runs steps of the last cell.

        Returns the replays, whether each step gave the result of its cell, and how many steps ran the graph.
        """
        ran: list[nn.Cell] = []

        def run_graph(inputs: tuple[Tensor, ...]) -> Tensor:
            ran.append(cells[0] if len(ran) < 2 else cells[-1])
            return ran[-1](inputs[0])

        replays = NativeReplays("test", run_graph, cells[0].get_parameters(), SlotLimits(ROWS, ROWS, 1))
        replays.record(np.zeros(1, np.int32), is_decode=True)
        is_right = True
        for step in range(5):
            ids = np.arange(step, step + 1 + step % ROWS, dtype=np.int32)
            numbers = np.zeros(ids.size, np.int32)
            inputs = StepInputs(
                ids, numbers, numbers, numbers.reshape(-1, 1), *[numbers] * 5, adapters=ids[:0], whole_prompts=False
            )
            given = replays.run(inputs, ids)[0].copy()
            is_right = is_right and given.tobytes() == cells[-1](Tensor.from_numpy(ids)).asnumpy().tobytes()
        return replays, is_right, len(ran)

    replays, is_right, runs = decodes(Layer())
    RESULTS["two steps by the graph, then replays"] = is_right and runs == 4 and replays.is_confirmed
    replays, is_right, runs = decodes(Layer(), Layer())
    RESULTS["what a recording does not know shows with other inputs"] = (
        is_right and runs == 8 and not replays.is_confirmed and replays.problem == "a replay gives another result"
    )


check_replays()
check_several_results()
check_what_is_not_recorded()
check_agreement()
check_refusals()
check_sizes()
check_reshapes()
check_confirmation()
print(json.dumps(RESULTS))
