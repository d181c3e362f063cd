"""What the kernels of a CPU hold beside the tensors: memory of their threads, and recorded launches.

A thread keeps what its largest call took, and a quarter more (``thread_scratch`` of agent/kernels/common). The bounds
here are of the largest step there can be; ``tests/agent/test_kernel_memory.py`` holds them against what the kernels
have taken. With the letters of ``memory_plan.py``, N threads, and W the widest input of a linear layer:

    rows             inputs of a linear layer as float32, and what the norm before it gives: W x 4 and h x max(b, 2) a
                     row. Of the fused operators a thread has 256 rows, and the one that calls 128 x N, or T if it is
                     alone; the MLP's are 256 at a time. Of the native ones the caller has T
    MLP              256 rows of I for each thread, and the output layer's T x h, in b; fused operators
    products         256 rows of h in float32 for each thread and each of the parts of ``parallel_config.sum_parts``
    panel            64 columns of a weight: W bytes each, and sums of 272 rows or of 8 of the depth each; a thread
    attention        keys, values and rows of a task, some 1024 x (D + 48) x 4 a thread
    split contexts   sums of the rows whose context several threads share: of a partition of 256 tokens D + 16 numbers,
                     for at most 8 x 192 rows a thread
    laid out keys    of a prompt, and its values, with native operators: at most 64 MiB
    sampler          60 bytes of V for each thread that samples: rows as they are sorted and filtered

The three graphs of native operators are recorded once (``agent/step_graph/replay/native.py``): some 16 KiB a
layer, with
experts 32, each. What they are replayed in is the activations and logits of the largest step that is, one of 512
tokens or of all sequences that decode, and its mask of a context a token, as it is made: 5 bytes for each.
The recorded step of fused operators (``agent/step_graph/replay/fused.py``) is 4 KiB a layer; from one operator
to the next go three matrices of T rows of h, of layers with experts one more, and q, k, v and what attention gives.
"""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.model.parallel import local_shape
from llm_serving.model.shape import ModelShape
from llm_serving.planning.rank_memory import FLOAT32_BYTES, MemoryItem, activation_bytes

KERNEL_SCRATCH = "kernel scratch"
REPLAYS = "replays"
PIECE_ROWS = 256
"""``kMlpRows`` of agent/kernels/custom_ops_fused.cc, ``kBlockRows`` of ops/linear_driver.h."""
THREAD_ROWS = 128
"""``kThreadRows`` of custom_ops_fused.cc."""
PANEL_COLUMNS = 64
TASK_ROWS = 192
"""``kTaskRows`` of ops/paged_rows.h; a thread has about 8 tasks (ops/paged_attention.h)."""
PARTITION_TOKENS = 256
MOST_LAID_OUT_BYTES = 64 << 20
SAMPLER_BYTES = 60
PAGE_BYTES = 4096
SLOTS = 16
"""Uses of scratch memory that each have their own; in whole pages."""
RECORDED_LAYER_BYTES = 16 << 10
RECORDED_FUSED_LAYER_BYTES = 4 << 10
RECORDED_GRAPHS = 3
"""Of native operators: ``GraphKind`` of agent/step_graph/dynamic_cell.py."""
MOST_REPLAYED_TOKENS = 512
"""Of a prompt. MindSpore's part in a step is some milliseconds, whatever its size."""
MASK_BYTES = 5
"""Of a token and a position: a truth, and numbers of two bytes before and after they are multiplied."""


def kernel_items(config: Config, rank: int, num_cores: int) -> tuple[MemoryItem, ...]:
    """Of an agent on a CPU of so many cores: its kernels' scratch memory, and what is recorded of its steps."""
    shape = local_shape(config.shape, config.shard(rank))
    threads = config.agent_threads(num_cores)
    basis = f"{threads} thread{'s' * (threads > 1)}, at most"
    scratch = MemoryItem(KERNEL_SCRATCH, _scratch_bytes(config, shape, threads), basis)
    if config.op_table == "native":
        tokens = most_replayed_tokens(config.max_num_batched_tokens, config.max_num_seqs)
        recorded = f"a step of up to {tokens} tokens, {shape.num_layers} layers, at most"
        return scratch, MemoryItem(REPLAYS, _native_replay_bytes(config, shape, tokens), recorded)
    recorded = f"a step, {shape.num_layers} layers, at most"
    return scratch, MemoryItem(REPLAYS, _fused_replay_bytes(config, shape), recorded)


def most_replayed_tokens(max_tokens: int, max_seqs: int) -> int:
    """Of a step of native operators, where one has at most ``max_tokens``, and a decode ``max_seqs``."""
    return max(max_seqs, min(max_tokens, MOST_REPLAYED_TOKENS))


def _fused_replay_bytes(config: Config, shape: ModelShape) -> int:
    row = 3 * shape.hidden_size  # all dense layers are one operator
    if shape.experts is not None:
        row += shape.hidden_size + (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    layers = (1 + shape.num_layers) * RECORDED_FUSED_LAYER_BYTES
    return layers + config.max_num_batched_tokens * row * config.dtype_bytes


def _native_replay_bytes(config: Config, shape: ModelShape, tokens: int) -> int:
    step = activation_bytes(config, shape) * tokens // config.max_num_batched_tokens
    mask = tokens * config.max_model_len * MASK_BYTES
    logits = config.max_num_seqs * shape.vocab_size * config.dtype_bytes
    layer = RECORDED_LAYER_BYTES * (1 if shape.experts is None else 2)
    return RECORDED_GRAPHS * (1 + shape.num_layers) * layer + step + mask + logits


def _scratch_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    wanted = (
        _row_bytes(config, shape, num_threads)
        + _mlp_bytes(config, shape, num_threads)
        + num_threads * (_panel_bytes(shape) + _attention_bytes(shape))
        + _split_context_bytes(config, shape, num_threads)
        + _laid_out_bytes(config, shape)
        + min(num_threads, config.max_num_seqs) * SAMPLER_BYTES * config.shape.vocab_size
    )
    return wanted + wanted // 4 + num_threads * SLOTS * PAGE_BYTES


def _inner(shape: ModelShape) -> int:
    return shape.intermediate_size if shape.experts is None else shape.experts.intermediate_size


def _widest(shape: ModelShape) -> int:
    return max(shape.hidden_size, shape.num_attention_heads * shape.head_dim, _inner(shape))


def _row_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    """The caller's rows, and those of the other threads."""
    tokens = config.max_num_batched_tokens
    own = tokens if num_threads == 1 else min(tokens, max(PIECE_ROWS, THREAD_ROWS * num_threads))
    others = (num_threads - 1) * min(tokens, PIECE_ROWS)
    widths = max(own * max(shape.hidden_size, shape.num_attention_heads * shape.head_dim), PIECE_ROWS * _inner(shape))
    if config.op_table == "native":
        own, others, widths = tokens, 0, tokens * _widest(shape)
    inputs = (widths + others * _widest(shape)) * FLOAT32_BYTES
    return inputs + (own + others) * (shape.hidden_size * max(config.dtype_bytes, 2) + 128)


def _mlp_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    if config.op_table != "fused":
        return 0
    tokens, hidden = config.max_num_batched_tokens, shape.hidden_size
    pieces = num_threads * min(tokens, PIECE_ROWS)
    sums = pieces * hidden * FLOAT32_BYTES * len(config.sum_shards)
    return (pieces * shape.intermediate_size + tokens * hidden) * config.dtype_bytes + sums


def _panel_bytes(shape: ModelShape) -> int:
    sums = max(2 * (PIECE_ROWS + 16), _widest(shape) // 8) * PANEL_COLUMNS * FLOAT32_BYTES
    return PANEL_COLUMNS * _widest(shape) + sums


def _attention_bytes(shape: ModelShape) -> int:
    return 1024 * (_padded_head(shape) + 48) * FLOAT32_BYTES


def _padded_head(shape: ModelShape) -> int:
    return -(-shape.head_dim // 64) * 64


def _split_context_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    rows = min(8 * TASK_ROWS * num_threads, config.max_num_batched_tokens * shape.num_attention_heads)
    partitions = -(-config.max_model_len // PARTITION_TOKENS)
    tasks = 80 * (config.max_num_seqs * shape.num_key_value_heads + rows)
    return rows * partitions * (_padded_head(shape) + 16) * FLOAT32_BYTES + tasks


def _laid_out_bytes(config: Config, shape: ModelShape) -> int:
    if config.op_table != "native":
        return 0
    keys = (config.max_model_len + 16) * shape.num_key_value_heads * shape.head_dim * config.dtype_bytes
    return min(MOST_LAID_OUT_BYTES, 2 * keys) + config.max_model_len
