"""The memory plan: how much memory a deployment needs, calculated before anything is loaded.

The formulas give bytes. They use these letters:

    T   tokens in the largest step               S   sequences in the largest step
    V   tokens in the vocabulary                 L   layers
    h   hidden size                              I   intermediate size
    H   query heads                              K   key-value heads
    D   size of a head                           P   maximum length of a sequence
    b   bytes of an element of ``model_dtype``

    weights          parameters x b. A tied embedding counts once; on a CPU twice, because the output weight is packed
                     separately. Integer formats: 8 or 4 bits for each parameter of linear layers, and 40 bits for
                     scale and zero point of each group
    KV cache         2 x L x K x D x b x block_size x num_blocks. In int8: D + 4 (a scale) instead of D x b. Scales of
                     native operators are repeated up to four times if K is not a multiple of 4. With latent
                     attention: L x (kv_lora_rank + qk_rope_head_dim) x b x block_size x num_blocks
    gathered blocks  native operators with an int8 KV cache: one layer's blocks of the largest step, as integers and as
                     floats (``gathered_bytes`` in ``rank_memory.py``)
    host blocks      as the KV cache, with num_host_blocks instead of num_blocks, for swapped sequences
    activations      T x (2h + (H + 2K)D + 2HD + 3I) x b for one layer: residual and its norm; query, key, value;
                     rotated query and output of attention; gate, up and their product. Latent attention has other
                     matrices (``rank_memory.py``)
    logits           fused: S x V x 4 (float32), and S x V x b more if ``model_dtype`` is another type. Native: S x V x
                     (b + 16), for the logits and four float32 matrices of the operators that find candidates. Several
                     Ascends: see ``_logit_bytes`` in ``rank_memory.py``
    rotary tables    2 x P x D x 4, cosine and sine. MindFormers may have more rows than P
    token history    S x P x 4, for penalties
    LoRA adapters    max_adapters x max_rank x (inputs + outputs of each layer that may have an adapter) x b: packed in
                     the agents, and once more in shared memory for agents that restart. Fused: the last huge page of
                     each adapter may be filled only in part. Native: one more adapter, and the matrices of layers with
                     the same inputs are joined (``stacked_values``)
    kernel scratch   memory that the threads of a CPU's kernels keep between calls (``kernel_memory.py``)
    replays          recorded launches of a CPU's operators, and their buffers (``kernel_memory.py``)
    draft model      its weights, its keys and values for the same blocks and for the drafts of each batch row, and its
                     activations, logits, scratch memory and replays, by the same formulas
    agent process    Python, MindSpore, compiled graphs, and MindFormers if it is used
    image decoding   2 x image_config.max_pixels x 16, in the server process, if the model reads images
    server process   HTTP, scheduler, tokenizer

On a CPU, the sum of all items must fit the free memory of the machine. On an Ascend, the host memory must hold the
processes, and the weights while the agents load. After loading, it must hold the host blocks instead of the weights
(``host_memory.py``). All other items must fit ``context.max_device_memory`` of the MindFormers YAML, if it is stated.

With several agents (``llm_serving/model/parallel.py``), H, K, I, L and V are the numbers of one agent's part of the
model. Only the agent that samples has the logits of the whole vocabulary, the token history and the draft model. Each
group has an exchange in shared memory. On a CPU, all agents share the machine, so the plan adds up their memory. On
Ascends, each agent has its own device, so the plan counts the agent that needs the most memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_serving.config import Config
from llm_serving.config.draft_config import draft_config
from llm_serving.config.draft_model import EAGLE, DraftModel
from llm_serving.errors import MemoryPlanError
from llm_serving.model.parallel import answers
from llm_serving.planning.host_memory import host_items, too_little_host_memory
from llm_serving.planning.kernel_memory import kernel_items
from llm_serving.planning.machine import Machine
from llm_serving.planning.rank_memory import (
    HOST_BLOCKS,
    KV_CACHE,
    WEIGHTS,
    MemoryItem,
    device_items,
    format_bytes,
    hand_over_items,
    host_block_items,
    linear_bytes,
    rank_kv_bytes_per_token,
)

GIB = 1024**3
MIB = 1024**2
AGENT_PROCESS_BYTES = 600 * MIB
"""Memory of an agent process with MindSpore, without the model."""
MINDFORMERS_BYTES = 250 * MIB
"""Memory of the package MindFormers and its imports, without MindSpore."""
SERVER_PROCESS_BYTES = 200 * MIB
"""Memory of the server process, without queues and caches."""
_SERVER = MemoryItem("server process", SERVER_PROCESS_BYTES, "HTTP, scheduler, tokenizer")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a deployment needs, item by item, and the memory that is available."""

    items: tuple[MemoryItem, ...]
    """On a CPU: sums over all agents of the machine. On Ascends: the items of the device that needs the most memory."""
    available_bytes: int | None
    """Bytes of memory that the deployment may use. None if the memory of the device is not known, as for an Ascend
    without ``max_device_memory``. Then every plan counts as fitting.
    """
    available_from: str
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    """Bytes of one token in the KV caches of the agents that ``items`` counts, including the draft model's cache."""
    max_model_len: int
    ranks: tuple[tuple[MemoryItem, ...], ...] = ()
    """Items of each agent, in order of rank. Empty if there is only one agent."""
    first_rank: int = 0
    """Rank of the first agent in ``ranks``."""
    counted: str = ""
    """The agents that ``items`` counts if there are several: ``all`` (CPU), or ``fullest`` (Ascend, the device that
    needs the most memory).
    """
    host_items: tuple[MemoryItem, ...] = ()
    """On Ascends: the items that are in host memory when the need is highest. Empty on a CPU, where ``items`` includes
    host memory.
    """

    others: tuple[MemoryPlan, ...] = ()
    """Plans of the other machines, if a replica spans several machines. Each of these plans needs at most as much
    memory as this plan. But a KV cache block may need more memory on another machine than on this one. So these
    machines also limit the number of blocks.
    """

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of the item with this name, or 0 if the plan has no item with this name."""
        return sum(each.num_bytes for each in self.items if each.name == name)

    @property
    def total_bytes(self) -> int:
        return sum(each.num_bytes for each in self.items)

    @property
    def fits(self) -> bool:
        if self.available_bytes is None:
            return True
        return self.total_bytes <= self.available_bytes and all(other.fits for other in self.others)

    @property
    def without_host_blocks(self) -> MemoryPlan:
        """Returns this plan without the item for the host pool."""
        return replace(
            self,
            items=_without(HOST_BLOCKS, self.items),
            ranks=tuple(_without(HOST_BLOCKS, items) for items in self.ranks),
            others=tuple(other.without_host_blocks for other in self.others),
        )

    @property
    def largest_num_blocks(self) -> int | None:
        """Number of KV cache blocks that fit into the memory of each machine together with the other items. None if the
        available memory is not known.
        """
        spare = self.spare_blocks
        return None if spare is None else max(spare + self.num_blocks, 0)

    @property
    def spare_blocks(self) -> int | None:
        """Number of further blocks that fit into the memory of each machine, negative if the plan does not fit.

        None if the available memory is not known.
        """
        if self.available_bytes is None:
            return None
        own = self._blocks_in(self.available_bytes - self.total_bytes)
        return min([own, *(spare for other in self.others if (spare := other.spare_blocks) is not None)])

    def _blocks_in(self, spare_bytes: int) -> int:
        """Returns the number of further blocks of this machine that ``spare_bytes`` bytes can hold."""
        block_bytes = self.kv_bytes_per_token * self.block_size
        if block_bytes:
            return spare_bytes // block_bytes
        # All layers of the agents on this machine have linear attention, so a block takes no memory here.
        return sys.maxsize if spare_bytes >= 0 else -self.num_blocks

    def table(self) -> str:
        """Returns the plan as text: a line for each item, the total and the available memory.

        If there are several agents, agents with equal needs share a column.
        """
        rows = [(each.name, *self._cells(each.name), format_bytes(each.num_bytes), each.basis) for each in self.items]
        kinds = self._kinds()
        totals = [format_bytes(sum(item.num_bytes for item in self.ranks[ranks[0]])) for ranks in kinds]
        rows.append(("total", *totals, format_bytes(self.total_bytes), ""))
        available = "not known" if self.available_bytes is None else format_bytes(self.available_bytes)
        rows.append(("available", *("" for _ in kinds), available, self.available_from))
        for each in self.host_items:
            rows.append((f"host: {each.name}", *("" for _ in kinds), format_bytes(each.num_bytes), each.basis))
        if kinds:
            names = [_name_ranks([self.first_rank + number for number in ranks]) for ranks in kinds]
            rows.insert(0, ("", *names, self.counted, ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        return "\n".join(_line(row, widths) for row in rows)

    def _kinds(self) -> list[list[int]]:
        """Groups the ranks by memory need. The agents in one of the returned lists need equal memory for each item."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, items in enumerate(self.ranks):
            found.setdefault(tuple(item.num_bytes for item in items), []).append(rank)
        return list(found.values())

    def _cells(self, name: str) -> list[str]:
        """Returns the sizes of one item as text, one for each list of ``_kinds``."""
        sizes = [sum(item.num_bytes for item in self.ranks[ranks[0]] if item.name == name) for ranks in self._kinds()]
        return [format_bytes(size) if size else "-" for size in sizes]


def plan_memory(config: Config, machine: Machine) -> MemoryPlan:
    """Returns the memory plan. If the plan does not fit, raises MemoryPlanError with the largest setting that fits.

    If the agents are on other machines, the plan is for the machine that needs the most memory. ``plan_node`` later
    compares the plan with the memory that a machine reports.
    """
    if config.parallel_config.is_remote:
        plan = estimate_memory(config, machine)
        return replace(plan, available_bytes=None, available_from="each node reports its own")
    return plan_node(config, machine)


def plan_node(config: Config, machine: Machine) -> MemoryPlan:
    """Returns the memory plan of one machine with agents.

    If the plan does not fit, raises MemoryPlanError with the largest setting that fits.
    """
    plan = estimate_memory(config, machine)
    if config.device != "CPU":
        _check_host_memory(config, machine)
        problem = too_little_host_memory(plan.host_items, machine)
        if problem is not None:
            raise MemoryPlanError(f"{problem}\n{plan.table()}")
    if not plan.fits:
        assert plan.available_bytes is not None
        raise MemoryPlanError(
            f"the memory plan needs {format_bytes(plan.total_bytes)}, of {format_bytes(plan.available_bytes)} "
            f"({plan.available_from}): {advice(plan)}\n{plan.table()}"
        )
    return plan


def estimate_memory(config: Config, machine: Machine) -> MemoryPlan:
    """Returns the memory plan, even if it needs more memory than the machine has.

    If a replica spans several machines, the plan is for the machine that needs the most memory.
    """
    plans = [
        replace(_estimate(config, machine, ranks), first_rank=ranks.start)
        for ranks in config.parallel_config.ranks_of_machines
    ]
    fullest = max(plans, key=lambda plan: plan.total_bytes)
    return replace(fullest, others=tuple(plan for plan in plans if plan is not fullest))


def _estimate(config: Config, machine: Machine, world: range) -> MemoryPlan:
    if config.device == "CPU":
        ranks = [_cpu_items(config, n, machine) for n in world]
        items = (*_summed(ranks), *_exchange_items(config), _SERVER)
        return _plan(config, items, ranks, sum(rank_kv_bytes_per_token(config, n) for n in world), machine)
    ranks = [device_items(config, n) for n in world]
    fullest = max(world, key=lambda n: sum(item.num_bytes for item in ranks[n - world.start]))
    available = Machine(config.context.max_device_memory_bytes or 0, "max_device_memory")
    plan = _plan(config, ranks[fullest - world.start], ranks, rank_kv_bytes_per_token(config, fullest), available)
    agents = _summed([(_agent_item(config),) for _ in world])
    plan = replace(plan, host_items=host_items(config, (*agents, _SERVER), world))
    return plan if config.context.max_device_memory_bytes is not None else replace(plan, available_bytes=None)


def estimate_rank_memory(config: Config, rank: int, device: Machine) -> MemoryPlan:
    """Returns the memory plan of one agent that has its own device. ``config`` describes the whole deployment."""
    items = device_items(config, rank)
    return _plan(config, items, [items], rank_kv_bytes_per_token(config, rank), device)


def _plan(
    config: Config,
    items: tuple[MemoryItem, ...],
    ranks: Sequence[tuple[MemoryItem, ...]],
    kv_bytes_per_token: int,
    available: Machine,
) -> MemoryPlan:
    return MemoryPlan(
        items=items,
        available_bytes=available.available_bytes,
        available_from=available.available_from,
        num_blocks=config.pa_config.num_blocks,
        block_size=config.pa_config.block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        max_model_len=config.max_model_len,
        ranks=tuple(ranks) if len(ranks) > 1 else (),
        counted="all" if config.device == "CPU" else "fullest",
    )


def _cpu_items(config: Config, rank: int, machine: Machine) -> tuple[MemoryItem, ...]:
    kernels = kernel_items(config, rank, machine.num_cores)
    draft = _draft_items(config, rank, machine)
    blocks = (*host_block_items(config, rank), *hand_over_items(config, rank))
    return (*device_items(config, rank), *kernels, *blocks, *draft, _agent_item(config))


def _draft_items(config: Config, rank: int, machine: Machine) -> tuple[MemoryItem, ...]:
    """Returns the items of the draft model: its weights, its KV cache, and its memory for steps (activations, logits,
    kernel scratch and replays).

    Empty without a draft model. The agents of a group that do not make the drafts need only memory for the hidden
    states.
    """
    if config.draft is None:
        return ()
    own = draft_config(config)
    model = replace(own.model_config, cpu_threads=config.agent_threads(machine.num_cores))
    own = replace(own, model_config=model)
    parts = {item.name: item for item in (*device_items(own, 0), *kernel_items(own, 0, machine.num_cores))}
    weights, blocks = parts.pop(WEIGHTS), parts.pop(KV_CACHE)
    rest = sum(item.num_bytes for item in parts.values())
    items = (
        _draft_weights(config, own, config.draft, weights),
        MemoryItem(f"draft model: {blocks.name}", blocks.num_bytes, blocks.basis),
        MemoryItem("draft model: steps", rest, "activations, logits, kernel scratch and replays"),
    )
    is_here = answers(rank, config.parallel_config)
    own_items = (replace(item, num_bytes=item.num_bytes * is_here) for item in items)
    return (*own_items, *_state_items(config, config.draft, makes_drafts=is_here))


def _draft_weights(config: Config, own: Config, draft: DraftModel, weights: MemoryItem) -> MemoryItem:
    """Returns the item of the draft model's weights. ``weights`` is the item of its layers, embedding and output layer.
    ``own`` is the config of the draft model, whose weight format may differ from the model's.

    A head (EAGLE-3 or MTP) uses the model's embedding. It has one or two more linear layers with joined inputs, and
    norms of these inputs. If agents share the model, the agent with the head also has the model's whole embedding.
    """
    name, head, shape = f"draft model: {weights.name}", draft.head, draft.shape
    if head is None:
        return MemoryItem(name, weights.num_bytes, weights.basis)
    hidden, heads = shape.hidden_size, shape.num_attention_heads + 2 * shape.num_key_value_heads
    joined, norms = 2 * hidden * hidden, 2
    if head.kind == EAGLE:
        norms = 1
        joined = len(head.layers) * head.hidden_size * hidden + heads * shape.head_dim * hidden
    others = norms * hidden - shape.vocab_size * hidden
    if config.parallel_config.tensor_parallel > 1:
        others += head.vocab_size * head.hidden_size
    num_bytes = weights.num_bytes + others * config.dtype_bytes + linear_bytes(own, joined)
    return MemoryItem(name, num_bytes, f"a layer, its inputs and its output layer in {own.weight_format}")


def _state_items(config: Config, draft: DraftModel, *, makes_drafts: bool) -> tuple[MemoryItem, ...]:
    """Returns the item of the hidden states that a head (EAGLE-3 or MTP) reads. Empty for a draft model without a head.

    There are three buffers for the largest step: of the model's graph, of the head's graph, and of tokens that wait for
    the head. An agent without the head has only the first one.
    """
    if draft.head is None:
        return ()
    tokens, places = config.max_num_batched_tokens, len(draft.head.layers)
    num_bytes = (3 * places + 2 if makes_drafts else places) * tokens * draft.head.hidden_size * config.dtype_bytes
    return (MemoryItem("draft model: hidden states", num_bytes, f"a step of {tokens} tokens, {places} layers"),)


def _summed(ranks: Sequence[tuple[MemoryItem, ...]]) -> tuple[MemoryItem, ...]:
    """Returns each item with the sum of its bytes over all agents. ``ranks`` has the items of each agent."""
    return tuple(
        MemoryItem(lines[0].name, sum(line.num_bytes for line in lines), lines[0].basis)
        for lines in zip(*ranks, strict=True)
    )


def _check_host_memory(config: Config, machine: Machine) -> None:
    """Raises MemoryPlanError if the host memory is too small for the host blocks alone."""
    machines = config.parallel_config.ranks_of_machines
    needed = max(sum(item.num_bytes for rank in world for item in host_block_items(config, rank)) for world in machines)
    if needed > machine.available_bytes:
        largest = machine.available_bytes // (needed // config.num_pool_blocks)
        tiers = config.kv_tier_config.host_blocks
        too_many = f"pa_config.num_host_blocks = {config.num_host_blocks}"
        if tiers:
            too_many += f" and kv_tier_config.host_blocks = {tiers} do not fit; at most {largest} blocks together do"
        else:
            too_many += f" does not fit; the largest that does is {largest}"
        raise MemoryPlanError(
            f"the host blocks need {format_bytes(needed)}, of {format_bytes(machine.available_bytes)} "
            f"({machine.available_from}): {too_many}"
        )


def _exchange_items(config: Config) -> tuple[MemoryItem, ...]:
    """Returns the item of the shared memory through which the agents of a group exchange arrays. Empty if each group
    has one agent.
    """
    from llm_serving.ipc.exchange import exchange_bytes  # imported here, because it imports numpy, which takes long

    parallel = config.parallel_config
    num_groups = max(1, parallel.agents_per_machine // parallel.group_size)
    num_bytes = exchange_bytes(config.shape, config.slot_limits(), parallel) * num_groups
    groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
    return (MemoryItem("exchange", num_bytes, f"of {groups} of agents"),) if num_bytes else ()


def _agent_item(config: Config) -> MemoryItem:
    if config.model_config.model_type == "mindformers":
        num_bytes = AGENT_PROCESS_BYTES + MINDFORMERS_BYTES
        return MemoryItem("agent process", num_bytes, "Python, MindSpore, MindFormers, graphs")
    return MemoryItem("agent process", AGENT_PROCESS_BYTES, "Python, MindSpore, graphs")


def _without(name: str, items: tuple[MemoryItem, ...]) -> tuple[MemoryItem, ...]:
    return tuple(each for each in items if each.name != name)


def _name_ranks(ranks: Sequence[int]) -> str:
    """Returns the title of a column for ranks: ``agent 0``, ``agents 1-3`` or ``agents 1, 3, 5``."""
    if len(ranks) == 1:
        return f"agent {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"agents {ranks[0]}-{ranks[-1]}"
    return f"agents {', '.join(map(str, ranks))}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Returns one line of the table: the name at the left, right-aligned sizes, then the explanation."""
    sizes = "  ".join(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True))
    return f"  {row[0].ljust(widths[0])}  {sizes}  {row[-1]}".rstrip()


def advice(plan: MemoryPlan) -> str:
    """Returns the end of the error message for a plan that does not fit: a setting that fits, or which memory is short.

    If the plan has host blocks, the text proposes fewer host blocks. Otherwise, it proposes fewer KV cache blocks.
    """
    if plan.bytes_of(HOST_BLOCKS):
        return _advice_on_host_blocks(plan)
    largest = plan.largest_num_blocks
    assert largest is not None
    assert plan.available_bytes is not None
    if plan.bytes_of(WEIGHTS) > plan.available_bytes:
        return "not even the weights fit; it takes a smaller model, a smaller model_config.model_dtype or more memory"
    if largest < 2:
        return (
            "the weights leave no memory for a KV cache; lower scheduler_config.max_num_batched_tokens (or "
            "model_config.seq_length) and model_config.decode_batch_size, or take a smaller model"
        )
    text = f"pa_config.num_blocks = {plan.num_blocks} does not fit; the largest that does is {largest}"
    longest = (largest - 1) * plan.block_size + 1
    if longest < plan.max_model_len:
        text += (
            f", too few for a sequence of {plan.max_model_len} tokens: lower pa_config.decode_seq_length "
            f"to {longest} or less too"
        )
    return text


def _advice_on_host_blocks(plan: MemoryPlan) -> str:
    rest = plan.without_host_blocks
    if not rest.fits:
        return f"without pa_config.num_host_blocks, too, {advice(rest)}"
    wanted = plan.bytes_of(HOST_BLOCKS) // (plan.kv_bytes_per_token * plan.block_size)
    return f"pa_config.num_host_blocks = {wanted} does not fit; the largest that does is {rest.spare_blocks}"
