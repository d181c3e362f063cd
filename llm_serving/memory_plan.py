"""What a deployment takes of the machine's memory, worked out before anything is loaded.

With T tokens and S sequences in the largest step, V tokens of vocabulary, L layers, hidden size h, intermediate size
I, H query and K key-value heads of size D, b bytes per element of ``model_dtype``, and P the longest sequence:

    weights          parameters x b, a tied embedding counted once (twice on a CPU, whose kernels have the output
                     weight packed apart); in a quantised format the linear layers take 8 bits a parameter, or 4 and
                     their group's share of 40 for scale and zero point
    KV cache         2 x L x K x D x b x block_size x num_blocks; (D + 4) in place of D x b in int8
    host blocks      the same with num_host_blocks, for sequences that are swapped out
    activations      T x (2h + (H + 2K)D + 2HD + 3I) x b: residual and its norm; q, k, v; rotated q and the attention's
                     output; gate, up and their product. One layer's worth: layers follow each other
    logits           S x V x 4 (float32), and S x V x b more where ``model_dtype`` is another type
    rotary tables    2 x P x D x 4, cosine and sine
    token history    S x P x 4, for penalties
    agent process    Python, MindSpore, compiled graphs
    server process   HTTP, scheduler, tokenizer

On a CPU all of it is taken from what the machine has free. On an Ascend the two processes and the host blocks live in
the host's memory, where the blocks must fit, and the rest must fit ``context.max_device_memory`` of the MindFormers
YAML, where that is stated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm_serving.config import Config
from llm_serving.errors import MemoryPlanError
from llm_serving.machine import Machine
from llm_serving.quantization import MAX_WEIGHT_ONLY_SIZE

GIB = 1024**3
MIB = 1024**2
EXPERT_PIECE_ROWS = 256
"""``kPieceRows`` of agent/kernels/custom_ops_experts.cc."""
AGENT_PROCESS_BYTES = 600 * MIB
SERVER_PROCESS_BYTES = 200 * MIB
FLOAT32_BYTES = 4
INT32_BYTES = 4
KV_CACHE = "KV cache"
HOST_BLOCKS = "host blocks"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the plan."""

    name: str
    num_bytes: int
    basis: str
    """What the number comes from."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The lines, and what there is to take them from."""

    items: tuple[MemoryItem, ...]
    available_bytes: int | None
    """None where it is not known (an Ascend without ``max_device_memory``): nothing is refused."""
    available_from: str
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_len: int

    def bytes_of(self, name: str) -> int:
        """Bytes of one line, 0 without it."""
        return sum(each.num_bytes for each in self.items if each.name == name)

    @property
    def total_bytes(self) -> int:
        return sum(each.num_bytes for each in self.items)

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    @property
    def without_host_blocks(self) -> MemoryPlan:
        """The same without swapping."""
        return replace(self, items=tuple(each for each in self.items if each.name != HOST_BLOCKS))

    @property
    def largest_num_blocks(self) -> int | None:
        """Most blocks that would fit, 0 when not even the rest does; None when the limit is not known."""
        if self.available_bytes is None:
            return None
        without_cache = self.total_bytes - self.bytes_of(KV_CACHE)
        return max((self.available_bytes - without_cache) // (self.kv_bytes_per_token * self.block_size), 0)

    def table(self) -> str:
        """The plan as text, one line an item, the total against what there is."""
        rows = [(each.name, format_bytes(each.num_bytes), each.basis) for each in self.items]
        rows.append(("total", format_bytes(self.total_bytes), ""))
        available = "not known" if self.available_bytes is None else format_bytes(self.available_bytes)
        rows.append(("available", available, self.available_from))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"  {name:<{widths[0]}}  {size:>{widths[1]}}  {basis}".rstrip() for name, size, basis in rows)


def plan_memory(config: Config, machine: Machine) -> MemoryPlan:
    """The plan. Raises MemoryPlanError, with the table and the largest setting that fits, when there is too little."""
    plan = estimate_memory(config, machine)
    if config.device != "CPU":
        _check_host_memory(config, machine)
    if not plan.fits:
        assert plan.available_bytes is not None
        raise MemoryPlanError(
            f"the memory plan needs {format_bytes(plan.total_bytes)}, of {format_bytes(plan.available_bytes)} "
            f"({plan.available_from}): {_advice(plan)}\n{plan.table()}"
        )
    return plan


def estimate_memory(config: Config, machine: Machine) -> MemoryPlan:
    """The plan, whether it fits or not."""
    items, available, source = _device_items(config), config.context.max_device_memory_bytes, "max_device_memory"
    if config.device == "CPU":
        items += _host_items(config) + _process_items()
        available, source = machine.available_bytes, machine.available_from
    return MemoryPlan(
        items=items,
        available_bytes=available,
        available_from=source,
        num_blocks=config.pa_config.num_blocks,
        block_size=config.pa_config.block_size,
        kv_bytes_per_token=config.kv_bytes_per_token,
        max_model_len=config.max_model_len,
    )


def _device_items(config: Config) -> tuple[MemoryItem, ...]:
    shape, cache = config.shape, config.pa_config
    tokens, seqs, longest = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    per_token = config.kv_bytes_per_token
    return (
        MemoryItem(
            WEIGHTS, _weight_bytes(config), f"{format_count(shape.num_parameters)} in {_weight_formats(config)}"
        ),
        MemoryItem(
            KV_CACHE,
            per_token * cache.block_size * cache.num_blocks,
            f"{cache.num_blocks} blocks of {cache.block_size} tokens, {format_bytes(per_token)} a token "
            f"in {config.kv_format}",
        ),
        MemoryItem("activations", _activation_bytes(config), f"a step of {tokens} tokens"),
        MemoryItem("logits", _logit_bytes(config), f"{seqs} sequences, vocabulary of {shape.vocab_size}"),
        MemoryItem("rotary tables", 2 * longest * shape.head_dim * FLOAT32_BYTES, f"{longest} positions"),
        MemoryItem("token history", seqs * longest * INT32_BYTES, f"{seqs} sequences of {longest} tokens"),
    )


def _host_items(config: Config) -> tuple[MemoryItem, ...]:
    cache = config.pa_config
    if config.num_host_blocks == 0:
        return ()
    num_bytes = config.kv_bytes_per_token * cache.block_size * config.num_host_blocks
    return (MemoryItem(HOST_BLOCKS, num_bytes, f"{config.num_host_blocks} blocks for sequences that are swapped out"),)


def _check_host_memory(config: Config, machine: Machine) -> None:
    """Where the device has a memory of its own, the blocks of the host are all there is to fit the host's."""
    needed = sum(each.num_bytes for each in _host_items(config))
    if needed > machine.available_bytes:
        block_bytes = config.kv_bytes_per_token * config.pa_config.block_size
        raise MemoryPlanError(
            f"the host blocks need {format_bytes(needed)}, of {format_bytes(machine.available_bytes)} "
            f"({machine.available_from}): pa_config.num_host_blocks = {config.num_host_blocks} does not fit; "
            f"the largest that does is {machine.available_bytes // block_bytes}"
        )


def _process_items() -> tuple[MemoryItem, ...]:
    return (
        MemoryItem("agent process", AGENT_PROCESS_BYTES, "Python, MindSpore, graphs"),
        MemoryItem("server process", SERVER_PROCESS_BYTES, "HTTP, scheduler, tokenizer"),
    )


def _weight_bytes(config: Config) -> int:
    shape, bits = config.shape, _linear_bits(config)
    # The kernels of a CPU have packed weights: that of the output apart from the embedding.
    output = shape.vocab_size * shape.hidden_size
    tied = output if shape.tie_word_embeddings else 0
    all_parameters = shape.num_parameters + (tied if config.device == "CPU" else 0)
    if bits is None:
        return all_parameters * config.dtype_bytes
    quantised = shape.num_linear_parameters
    if config.op_table == "native" and (tied or _output_stays_float(config)):
        quantised -= output
    return (all_parameters - quantised) * config.dtype_bytes + int(quantised * bits / 8)


def _linear_bits(config: Config) -> float | None:
    """Of a weight of a linear layer with its share of scales and zero points; None: as ``model_dtype``. Behind the
    native primitives of a CPU, int4 is packed as int8 with the scales of its groups."""
    group = config.model_config.weight_group
    int4 = 4.0 + (32 + 8) / group
    if config.op_table == "native":
        int4 = 8.0 + 32 / group if config.device == "CPU" else 4.0 + (16 + 16) / group
    return {"int8": 8.0, "int8_weight_only": 8.0, "int4": int4}.get(config.weight_format)


def _output_stays_float(config: Config) -> bool:
    return config.weight_format != "int8" and config.shape.vocab_size > MAX_WEIGHT_ONLY_SIZE


def _weight_formats(config: Config) -> str:
    weights, dtype = config.weight_format, config.model_config.model_dtype
    return dtype if weights == dtype else f"{weights}, embedding and norms in {dtype}"


def _activation_bytes(config: Config) -> int:
    shape = config.shape
    query, key_value = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    per_token = 2 * shape.hidden_size + (query + 2 * key_value) + 2 * query + 3 * shape.intermediate_size
    if config.op_table == "native" and shape.sliding_window:
        per_token += 2 * config.max_model_len  # the mask of the window, and what it is made of
    return config.max_num_batched_tokens * per_token * config.dtype_bytes + _expert_bytes(config)


def _expert_bytes(config: Config) -> int:
    """Rows grouped by expert, as often as each is chosen; the fused operators take so many rows at a time."""
    shape, rows = config.shape, config.max_num_batched_tokens
    if shape.experts is None:
        return 0
    if config.op_table == "fused":
        rows = min(rows, EXPERT_PIECE_ROWS)
    per_row = (shape.hidden_size + shape.experts.intermediate_size) * config.dtype_bytes
    return rows * shape.experts.per_token * (per_row + shape.hidden_size * FLOAT32_BYTES)


def _logit_bytes(config: Config) -> int:
    per_logit = FLOAT32_BYTES + (0 if config.dtype_bytes == FLOAT32_BYTES else config.dtype_bytes)
    return config.max_num_seqs * config.shape.vocab_size * per_logit


def _advice(plan: MemoryPlan) -> str:
    """What would fit. Host blocks are the first to go: a server runs without them."""
    if plan.bytes_of(HOST_BLOCKS):
        return _advice_on_host_blocks(plan)
    largest = plan.largest_num_blocks
    assert largest is not None
    assert plan.available_bytes is not None
    if plan.bytes_of(WEIGHTS) > plan.available_bytes:
        return "not even the weights fit; it takes a smaller model, a smaller model_config.model_dtype or more memory"
    if largest < 2:
        return (
            "the weights leave no room for a KV cache; lower scheduler_config.max_num_batched_tokens (or "
            "model_config.seq_length) and model_config.decode_batch_size, or take a smaller model"
        )
    advice = f"pa_config.num_blocks = {plan.num_blocks} does not fit; the largest that does is {largest}"
    longest = (largest - 1) * plan.block_size + 1
    if longest < plan.max_model_len:
        advice += (
            f", too few for a sequence of {plan.max_model_len} tokens: lower pa_config.decode_seq_length "
            f"to {longest} or less too"
        )
    return advice


def _advice_on_host_blocks(plan: MemoryPlan) -> str:
    rest = plan.without_host_blocks
    if not rest.fits:
        return f"without pa_config.num_host_blocks, too, {_advice(rest)}"
    assert rest.available_bytes is not None
    block_bytes = plan.kv_bytes_per_token * plan.block_size
    wanted = plan.bytes_of(HOST_BLOCKS) // block_bytes
    largest = (rest.available_bytes - rest.total_bytes) // block_bytes
    return f"pa_config.num_host_blocks = {wanted} does not fit; the largest that does is {largest}"


def format_bytes(num_bytes: int) -> str:
    """With the unit that leaves one to four digits before the point: ``512 B``, ``1.5 MiB``, ``12.6 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def format_count(count: int) -> str:
    """Parameters the way people say them: ``6.74 B``, ``3.7 M``."""
    for size, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "K", 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit} parameters"
    return f"{count} parameters"
