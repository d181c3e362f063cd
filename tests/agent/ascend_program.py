"""Runs the parts of the Ascend backend that MindSpore also supports on a CPU, and prints the results as JSON.

test_ascend_on_cpu.py starts it in a separate process.

python tests/agent/ascend_program.py [moves] [refusals] [sharing] [padded] [capture] [own_memory]

All parts run in one process, in the given order. The weights are written to the working directory.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "agent")]

from agent.backends.runtime import start_runtime  # noqa: E402
from llm_serving.errors import AgentError  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import VARIANTS  # noqa: E402
from support.agent_group import with_layers  # noqa: E402
from support.cache_blocks import COPY, HOST_BLOCKS, IN, OUT, Arrays, after_moves, bits, make_caches, random_moves  # noqa: E402
from support.step_config import make_config  # noqa: E402

MODEL = "llama3_rope"
"""One layer of this model runs, because MindSpore compiles its graphs several times."""
FOLDER = Path.cwd() / MODEL
TAIL = (2, 16, 36)


def bound(device: Arrays) -> list[Any]:
    """Returns MindSpore parameters that share the memory of the arrays in ``device``.

    An operator has already read each parameter.
    """
    from mindspore import Parameter, Tensor, ops

    from agent.layers.parameter import bind, unbound_parameter

    types = {2: "bfloat16", 1: "int8"}
    caches: list[Parameter] = [unbound_parameter(array.shape, types[array.itemsize]) for array in device]
    gather = ops.Gather()
    for cache, array in zip(caches, device, strict=True):
        bind(cache, array)
        gather(cache, Tensor(np.zeros(1, np.int32)), 0).asnumpy()
    return caches


def run_moves() -> dict[str, bool]:
    """Runs random block moves in caches of bfloat16 and of int8.

    Returns for each type whether NumPy gives the same caches.
    """
    from agent.backends.ascend.blocks import DeviceBlockMoves

    same = {}
    for dtype, name in (("uint16", "bfloat16"), ("int8", "int8")):
        device, host = make_caches(5, dtype, TAIL)
        host = [np.zeros_like(array) for array in host]
        moves = DeviceBlockMoves(bound(device), ((HOST_BLOCKS, *TAIL), name), pinned=False)
        assert moves.num_host_bytes == sum(array.nbytes for array in host)
        for seed in range(4):
            chosen = random_moves(60, seed)
            device_wanted, host = after_moves(device, host, chosen)
            moves.run(chosen)
            same[f"{name} {seed}"] = bits(device) == bits(device_wanted)
        without = DeviceBlockMoves(bound(device), ((0, *TAIL), name), pinned=False)
        many = np.array([(COPY, 1 + n % 4, 5 + n % 4) for n in range(40)], np.int32)
        device_wanted, _ = after_moves(device, host, many)
        without.run(many)
        same[f"{name} without a pool"] = bits(device) == bits(device_wanted) and without.num_host_bytes == 0
    return same


def run_refusals() -> dict[str, Any]:
    """Runs invalid block moves, each after a valid move in the same step. Returns their errors by name.

    For the error "lost", the device does not execute the copies to its last cache. Also returns whether the invalid
    steps left the caches unchanged, and the number of copies.
    """
    from agent.backends.ascend import blocks

    device, _ = make_caches(2, "uint16", TAIL)
    before, layout = bits(device), ((HOST_BLOCKS, *TAIL), "bfloat16")
    caches = bound(device)
    moves = blocks.DeviceBlockMoves(caches, layout, pinned=False)
    wrong = {"kind": (3, 1, 1), "source": (COPY, 9, 1), "host source": (IN, 4, 1), "host destination": (OUT, 1, -1)}
    errors = {
        name: _error_of(lambda move=move: moves.run(np.array([(COPY, 1, 2), move], np.int32)))
        for name, move in wrong.items()
    }
    real, calls = blocks.swap_cache, []

    def loses_the_last(host: Any, cache: Any, mapping: Any, is_device_to_host: bool) -> None:
        calls.append(is_device_to_host)
        if is_device_to_host or cache is not caches[-1]:
            real(host, cache, mapping, is_device_to_host)

    with mock.patch.object(blocks, "swap_cache", loses_the_last):
        errors["lost"] = _error_of(lambda: blocks.DeviceBlockMoves(caches, layout, pinned=False).run(random_moves(3)))
    return {"errors": errors, "unharmed": bits(device) == before, "calls": len(calls)}


def _error_of(run: Callable[[], None]) -> str:
    try:
        run()
    except AgentError as error:
        return str(error)
    return "no error"


@functools.cache
def moving_driver() -> Any:
    """Returns the driver of a model with the block moves of an Ascend. Several parts share it."""
    from step_driver import StepDriver

    from agent.backends.ascend.blocks import DeviceBlockMoves
    from agent.backends.cpu.native import NativeCpuOps

    def block_moves(
        self: NativeCpuOps, arrays: Any, parameters: Any, host: Any, pool: Any = None
    ) -> DeviceBlockMoves:
        return DeviceBlockMoves(parameters, host, pool, pinned=False)

    with mock.patch.object(NativeCpuOps, "block_moves", block_moves):
        return StepDriver(make_config(FOLDER, "bfloat16", "native"))


def run_sharing() -> dict[str, Any]:
    """Runs ``run_block_sharing``, in which blocks are shared, copied and swapped, with the block moves of an Ascend."""
    from block_sharing import run_block_sharing

    from support.golden_files import golden_of

    driver = moving_driver()
    return {"sharing": run_block_sharing(driver, golden_of(MODEL)), "summary": driver.runner.summary()}


def run_padded() -> dict[str, Any]:
    """Returns digests of the outputs of decoding sequences, alone and in batches.

    The same steps run first as they are, and then padded to the sizes of captured graphs.
    """
    from step_driver import Part, blocks_for

    from agent.step_graph.making import make_step_graph

    driver = moving_driver()
    runner, limits = driver.runner, driver.config.slot_limits()

    def decode() -> list[list[str]]:
        runner.reset()
        digests = []
        for count in (1, 2, 3, 8, 5):
            driver.prefill(*[Part([5 + row, 9, 11], 0, blocks_for(row), row) for row in range(min(count, 4))])
            for row in range(4, count):
                driver.prefill(Part([5 + row, 9, 11], 0, blocks_for(row), row))
            for step in range(2):
                parts = [Part([7 + row], 3 + step, blocks_for(row), row) for row in range(count)]
                digests.append([output.digest for output in driver.decode(*parts)])
        return digests

    plain = decode()
    model, max_prefill_seqs = runner._model, driver.config.max_prefill_seqs
    vocab_size = driver.config.shape.vocab_size
    runner._graph = make_step_graph(
        model.network, model.ops, runner._reader.buffers, limits, max_prefill_seqs, vocab_size, (1, 4, 8)
    )
    runner._graph.compile()
    sizes: list[int] = []
    original = runner._graph._tensors
    runner._graph._tensors = lambda kind, inputs, *rest: (
        sizes.append(inputs.query_lens.size) if kind.value == "decode" else None,
        original(kind, inputs, *rest),
    )[1]
    return {"plain": plain, "padded": decode(), "sizes": sizes, "phases": _phases(runner._graph)}


def run_own_memory() -> dict[str, Any]:
    """Runs the same steps on two CPU backends, one of which claims that its device has its own memory.

    Returns the digests of both, and the names and bytes of the arrays that stay in host memory.
    """
    from dataclasses import replace

    from step_driver import Part, StepDriver, blocks_for

    from agent.backends.ascend.blocks import DeviceBlockMoves
    from agent.backends.cpu.native import NativeCpuHooks, NativeCpuOps

    def block_moves(
        self: NativeCpuOps, arrays: Any, parameters: Any, host: Any, pool: Any = None
    ) -> DeviceBlockMoves:
        return DeviceBlockMoves(parameters, host, pool, pinned=False)

    def digests(driver: Any) -> list[str]:
        found = [driver.prefill(Part([5 + row, 9, 11], 0, blocks_for(row), row))[0].digest for row in range(3)]
        for step in range(3):
            parts = [Part([7 + row], 3 + step, blocks_for(row), row) for row in range(3)]
            found += [output.digest for output in driver.decode(*parts)]
        return found

    # Neither driver packs its weights, because packed products are rounded differently from the products of the
    # primitives.
    NativeCpuHooks.take_weights = lambda self, weights, *, tied: None
    plain = StepDriver(make_config(FOLDER, "bfloat16", "native"))
    plain_traits = NativeCpuOps.traits
    NativeCpuOps.traits = replace(plain_traits, own_memory=True, replays_steps=False)
    NativeCpuOps.block_moves = block_moves
    own = StepDriver(make_config(FOLDER, "bfloat16", "native"))
    model, plain_model = own.runner._model, plain.runner._model
    caches = [name for name in model.network.parameters_dict() if name.endswith("_cache")]
    return {
        "plain": digests(plain),
        "own": digests(own),
        "host weights": sorted(model.weights),
        "host caches": sorted(model.kv_cache.arrays),
        "caches": len(caches),
        "bytes": [model.weight_bytes, model.kv_cache.num_bytes],
        "plain bytes": [plain_model.weight_bytes, plain_model.kv_cache.num_bytes],
    }


def _phases(graph: Any) -> dict[str, str]:
    return {kind.value: compiled.cell.phase for kind, compiled in graph._graphs.items()}


def run_capture() -> dict[str, Any]:
    """Checks that ``set_kernel_launch_capture`` sets MindSpore's option for captured launches.

    Returns the option before and after the call.
    """
    import mindspore as ms
    from mindspore._c_expression import RuntimeConf

    conf = RuntimeConf.get_instance()
    before = conf.get_enable_kernel_launch_capture()
    ms.runtime.set_kernel_launch_capture(True, ["AllGather"])
    return {"before": before, "after": conf.get_enable_kernel_launch_capture()}


PARTS: dict[str, Callable[[], Any]] = {
    "moves": run_moves,
    "refusals": run_refusals,
    "sharing": run_sharing,
    "padded": run_padded,
    "capture": run_capture,
    "own_memory": run_own_memory,
}

if __name__ == "__main__":
    write_model(with_layers(VARIANTS[MODEL], 1), FOLDER)
    start_runtime(make_config(FOLDER, "bfloat16", "native"))
    print(json.dumps({part: PARTS[part]() for part in sys.argv[1:]}))
