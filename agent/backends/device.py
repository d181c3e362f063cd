"""Defines the interfaces of a device apart from its operators: its properties, hooks, and copies of cache blocks. Hooks
are methods that the agent calls around each run of a graph.

``agent.backends.base`` has the table of operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from agent.backends.launch import Launch, OnDevice
from agent.step_inputs import Int32Array
from agent.weights.storage import Array


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device that decide how graphs are built and how weights are loaded."""

    op_table: str
    """The name of the op table, one of the values of the setting ``model_config.op_table``."""
    packs_weights: bool = False
    """True: a linear weight is one packed blob (``agent.kernels.packing``) that includes its bias, and a tied output
    weight is a parameter of its own. False: weights are [out, in] as in checkpoints."""
    pads_whole_prompts: bool = True
    """The form of the input ``query_lens`` in the graph for whole prompts. True: int64 with a fixed number of elements,
    where zeros follow the lengths of the prompts. False: int32 with one length for each prompt.
    """
    own_memory: bool = False
    """True: the device has its own memory. Each weight is copied to the device and then freed in host memory. The KV
    cache is created on the device. False: the device uses the host's arrays in place.
    """
    replays_steps: bool = False
    """Whether the kernel launches of a dynamic graph can be recorded, and replayed without MindSpore."""
    runs_ahead: bool = False
    """Whether ``DeviceHooks.launch`` returns before the device has computed the step. Then the next step can be
    launched before the host has read the tokens of this step (``agent.run_ahead``).
    """


class BlockMoves(ABC):
    """Copies cache blocks of all layers, within the cache and between the cache and a pool in host memory.

    Owns this host pool. Graphs cannot read a block in the pool.
    """

    num_host_bytes: int
    """Size of the host pool in bytes."""

    @abstractmethod
    def run(self, moves: Int32Array) -> None:
        """Runs the copies in ``moves``, in their order.

        ``moves`` is a contiguous int32 array [copies, 3] with ``MoveKind``, source block and destination block. Call
        this only after a graph has run with the cache, and while no graph is running. If a kind or a block does not
        exist, copies nothing and raises AgentError or KernelError.
        """


class DeviceHooks:
    """Methods that the agent calls after it has loaded the weights, and around each run of a graph.

    A device overrides the methods for which it needs its own code. By default, ``launch`` runs the graph, and the other
    methods do nothing.
    """

    def take_weights(self, weights: Mapping[str, Array], *, tied: bool) -> None:
        """Prepares the loaded ``weights`` for the operators. Called once, before the first graph is compiled.

        ``weights`` maps parameter names to arrays in host memory. The arrays live as long as the op table. If ``tied``,
        the embedding is also the output weight.
        """
        del weights, tied

    def take_caches(self, caches: Mapping[str, Array]) -> None:
        """Prepares the arrays of a KV cache for the operators. Called before the first run of a graph that uses them.

        ``caches`` maps parameter names to arrays in host memory, which hold zeros. It is empty if the device has its
        own memory.
        """
        del caches

    @contextmanager
    def graph_run(self, *, compiles: bool = False) -> Iterator[None]:
        """Returns a context manager for one run of a graph. ``compiles`` means that the run also compiles the graph.

        Its exit raises OperatorRefusedError if an operator refused its inputs. The graph's result is then undefined.
        """
        del compiles
        yield

    def launch(self, run: Callable[[], tuple[OnDevice, ...]], fetched: slice) -> Launch:
        """Launches a graph by calling ``run``, and returns the launch with the graph's results.

        ``fetched`` selects the results that the host will read. If ``DeviceTraits.runs_ahead`` is True, this method
        returns before the results are computed. The device then copies the selected results to the host before it
        starts any later launch.
        """
        return Launch(run(), fetched)
