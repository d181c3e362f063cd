"""Upper bounds of the memory that CPU kernels need in addition to tensors: threads' scratch memory, recorded launches.

A thread keeps the scratch memory that its largest call needed, and a quarter more
(``agent/kernels/common/thread_pool.h``). The bounds are for the largest possible step.
``tests/agent/test_kernel_memory.py`` compares the bounds with the memory that kernels use.

The descriptions use these letters:

    T   tokens in the largest step               N   threads
    W   inputs of the widest linear layer        b   bytes of an element of ``model_dtype``
    h   hidden size                              I   intermediate size
    E   intermediate size of an expert
    D   size of a head                           V   tokens in the vocabulary

Items of the scratch memory:

    rows             inputs of a linear layer in float32 (W x 4 bytes for each token), and results of the norm before
                     the layer (h x max(b, 2) bytes for each token). Native operators: T tokens. Fused operators: 256
                     tokens for each thread. The calling thread has 128 x N tokens instead, or T if it is alone.
                     Weights with int8 activations need at most 3 of the 4 bytes: the int8 number, and the same number
                     in 16 bits on processors with AVX2 and without AVX-VNNI
    adapters         fused operators: for each of these tokens, the products with the matrices A of LoRA adapters. They
                     are (1 + W / 1024) x 4 bytes for each rank of the joined layers, and 12 bytes more in bfloat16
                     (AMX). In bfloat16, each thread also has a copy of up to 32 rows of 1024 inputs
    MLP              fused operators: 256 rows of I elements for each thread, and [T, h] results of the output layer
    products         256 rows of h float32 numbers, for each thread and each part of ``parallel_config.sum_parts``
    biased experts   native operators: 256 rows of 2 x E or h float32 numbers, before the bias of an expert is added
    panel            for each thread, 64 columns of a weight (W bytes each) and the float32 sums of these columns
    attention        for each thread, keys, values and query rows of one task: about 1024 x (D + 48) x 4 bytes
    linear attention for each thread, the buffers of one value head: inputs and results of 16 tokens, and the weights
                     of the convolution. With drafts, also the matrix of the head
    split contexts   partial results of query rows whose context several threads share: D + 16 float32 numbers for each
                     row and each partition of 256 tokens. There are at most 8 x 192 rows for each thread
    laid out keys    native operators, and latent attention: a prompt's keys and values in the layout that the kernel
                     reads, at most 64 MiB
    sampler          60 x V bytes for each thread that samples: sorted and filtered logits

Recorded launches with native operators: three graphs are recorded once (``agent/step_graph/replay/native.py``). They
take about 16 KiB for each layer, or 32 KiB with experts. A replay also needs the activations and logits of the largest
replayed step, which has 512 tokens or one token of each sequence. With attention sinks, steps of any size are replayed.
A replay needs 5 bytes for each entry of the attention mask, or 1 byte with sinks. It also needs the gathered blocks of
an int8 cache.

Recorded launches with fused operators: one step is recorded (``agent/step_graph/replay/fused.py``). It takes 4 KiB for
each layer. Three matrices [T, h] pass between the operators. A model with experts has a fourth matrix [T, h], and
matrices for the query, key, value and output of attention. A model with linear attention has these too, and the gate
of attention, and the projected inputs and the results of linear attention.
"""

from __future__ import annotations

from llm_serving.config import Config
from llm_serving.lora.targets import joined_targets
from llm_serving.model.parallel import local_shape
from llm_serving.model.shape import ModelShape
from llm_serving.planning.rank_memory import (
    FLOAT32_BYTES,
    INT32_BYTES,
    MemoryItem,
    activation_bytes,
    copied_cache_bytes,
    gathered_bytes,
)

KERNEL_SCRATCH = "kernel scratch"
REPLAYS = "replays"
PIECE_ROWS = 256
"""Rows of a matrix that a thread computes at a time: ``kMlpRows`` and ``kBlockRows`` of ``agent/kernels``."""
THREAD_ROWS = 128
"""Rows for each thread in a fused operator: ``kThreadRows`` of ``agent/kernels/custom_ops_fused.cc``."""
PANEL_COLUMNS = 64
"""Columns of a panel of packed weights (``kPanelColumns`` of agent/kernels/ops/linear.h)."""
TASK_ROWS = 192
"""Query rows in a task of paged attention (``kTaskRows`` of ``agent/kernels/ops``). A thread has about 8 tasks."""
PARTITION_TOKENS = 256
"""Keys that share one pass of the softmax in paged attention (``kPartition`` of agent/kernels/ops/paged_units.h)."""
MOST_LAID_OUT_BYTES = 64 << 20
"""Maximum bytes of a prompt's keys and values in the layout that the kernel reads (``kMostLaidOutBytes`` of
agent/kernels/ops/paged_layout.h).
"""
SAMPLER_BYTES = 60
"""Bytes that the sampler needs for each token of the vocabulary and each thread."""
DELTA_PIECE = 16
"""Tokens that a task of linear attention computes at a time: ``kDeltaPiece`` of ``agent/kernels/ops``."""
RANK_LANES = 16
"""Ranks of LoRA adapters are padded to a multiple of this number (``kRankLanes`` of agent/kernels/ops/lora.h)."""
SHRINK_DEPTH = 1024
"""Inputs that one task multiplies by a matrix A of an adapter (``kShrinkDepth`` of agent/kernels/ops/lora.h)."""
SHRINK_ROWS = 32
"""Maximum rows that one task multiplies by a matrix A of an adapter (``kShrinkRows`` of agent/kernels/ops/lora.h)."""
ADAPTER_ROW_BYTES = 36
"""Bytes of a row's adapter, tile and number (``ShrinkTile`` and ``Memory`` of agent/kernels/ops/lora.*)."""
ADAPTER_SLOTS = 4
"""Number of separately allocated parts of the scratch memory for adapters."""
PAGE_BYTES = 4096
"""Size of a page of memory. Each scratch buffer of a thread can waste one page."""
SLOTS = 16
"""Number of separately allocated parts of a thread's scratch memory. Each part is rounded up to whole pages."""
RECORDED_LAYER_BYTES = 16 << 10
"""Bytes that the recorded launches of one layer need with native operators."""
RECORDED_FUSED_LAYER_BYTES = 4 << 10
"""Bytes that the recorded launches of one layer need with fused operators."""
RECORDED_CACHE_BYTES = 32 << 10
"""Bytes per layer of the recorded launches that quantise and dequantise keys and values."""
RECORDED_GRAPHS = 3
"""Number of recorded graphs with native operators, which is the number of members of ``GraphKind``
(``agent/step_graph``).
"""
MOST_REPLAYED_TOKENS = 512
"""Maximum number of prompt tokens in a replayed step. In larger steps, a replay would save too little time."""
MASK_BYTES = 5
"""Bytes for each entry of the attention mask: a boolean, and two 16-bit numbers (before and after a multiplication)."""


def kernel_items(config: Config, rank: int, num_cores: int) -> tuple[MemoryItem, ...]:
    """Returns the memory plan's items "kernel scratch" and "replays" for an agent on a CPU with ``num_cores`` cores."""
    shape = local_shape(config.shape, config.shard(rank))
    threads = config.agent_threads(num_cores)
    basis = f"{threads} thread{'s' * (threads > 1)}, at most"
    scratch = MemoryItem(KERNEL_SCRATCH, _scratch_bytes(config, shape, threads), basis)
    if config.op_table == "native":
        tokens = most_replayed_tokens(
            config.max_num_batched_tokens, config.max_step_seqs, attends_by_token=shape.sinks
        )
        recorded = f"a step of up to {tokens} tokens, {shape.num_layers} layers, at most"
        return scratch, MemoryItem(REPLAYS, _native_replay_bytes(config, shape, tokens), recorded)
    recorded = f"a step, {shape.num_layers} layers, at most"
    return scratch, MemoryItem(REPLAYS, _fused_replay_bytes(config, shape), recorded)


def most_replayed_tokens(max_tokens: int, max_seqs: int, *, attends_by_token: bool) -> int:
    """Returns the number of tokens in the largest step that is replayed with native operators.

    ``max_tokens`` is the maximum number of tokens in a step. ``max_seqs`` is the maximum number of sequences in a
    decode step. A graph that attends by token (``OpTable.attends_by_token``) copies the KV cache in each step, and a
    replay does not. Therefore its steps of any size are replayed.
    """
    return max(max_seqs, max_tokens if attends_by_token else min(max_tokens, MOST_REPLAYED_TOKENS))


def _fused_replay_bytes(config: Config, shape: ModelShape) -> int:
    row = 3 * shape.hidden_size  # the three matrices that pass between the operators of a dense model
    if shape.experts is not None or shape.latent is not None:
        row += shape.hidden_size + (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    if shape.latent is not None:
        row += shape.latent.query_rank + shape.latent.cache_dim + shape.intermediate_size
    if shape.gated_attention:
        row += shape.hidden_size + (3 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    if shape.delta is not None:
        row += shape.delta.projected + shape.delta.values
    layers = (1 + shape.num_layers) * RECORDED_FUSED_LAYER_BYTES
    return layers + config.max_num_batched_tokens * row * config.dtype_bytes


def _native_replay_bytes(config: Config, shape: ModelShape, tokens: int) -> int:
    copied = copied_cache_bytes(config, shape)  # a replay copies no cache, unlike MindSpore's graph
    step = (activation_bytes(config, shape) - copied) * tokens // config.max_num_batched_tokens
    mask = 0 if shape.sinks else tokens * config.max_model_len * MASK_BYTES  # with sinks, the activations include it
    logits = config.max_step_seqs * shape.vocab_size * config.dtype_bytes
    layer = RECORDED_LAYER_BYTES * (1 if shape.experts is None else 2)
    gathered = gathered_bytes(config, shape) if config.gathers_blocks else 0
    layers = RECORDED_GRAPHS * (1 + shape.num_layers) * (layer + (RECORDED_CACHE_BYTES if gathered else 0))
    tables = tokens * config.max_blocks_per_seq * INT32_BYTES if shape.sinks else 0
    return layers + step + mask + logits + gathered + tables


def _scratch_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    wanted = (
        _row_bytes(config, shape, num_threads)
        + _adapter_bytes(config, shape, num_threads)
        + _mlp_bytes(config, shape, num_threads)
        + _biased_expert_bytes(config, shape)
        + num_threads * (_panel_bytes(shape) + _attention_bytes(shape) + _delta_bytes(config, shape))
        + _split_context_bytes(config, shape, num_threads)
        + _laid_out_bytes(config, shape)
        + _latent_bytes(config, shape)
        + min(num_threads, config.max_step_seqs) * SAMPLER_BYTES * config.shape.vocab_size
    )
    return wanted + wanted // 4 + num_threads * SLOTS * PAGE_BYTES


def _inner(shape: ModelShape) -> int:
    return shape.intermediate_size if shape.experts is None else shape.experts.intermediate_size


def _widest(shape: ModelShape) -> int:
    latent = 0 if shape.latent is None else max(shape.latent.query_rank, shape.latent.rank)
    return max(shape.hidden_size, shape.num_attention_heads * shape.head_dim, _inner(shape), latent)


def _row_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    """Returns the bytes of inputs of linear layers and results of norms, for all threads of an operator."""
    tokens = config.max_num_batched_tokens
    own, others = _rows_of_threads(config, num_threads)
    widths = max(own * max(shape.hidden_size, shape.num_attention_heads * shape.head_dim), PIECE_ROWS * _inner(shape))
    if config.op_table == "native":
        own, others, widths = tokens, 0, tokens * _widest(shape)
    inputs = (widths + others * _widest(shape)) * FLOAT32_BYTES
    return inputs + (own + others) * (shape.hidden_size * max(config.dtype_bytes, 2) + 128)


def _rows_of_threads(config: Config, num_threads: int) -> tuple[int, int]:
    """Returns the rows of a fused operator that the calling thread has, and those that the other threads have."""
    tokens = config.max_num_batched_tokens
    own = tokens if num_threads == 1 else min(tokens, max(PIECE_ROWS, THREAD_ROWS * num_threads))
    return own, (num_threads - 1) * min(tokens, PIECE_ROWS)


def _adapter_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    """Returns the bytes of the products with the matrices A of LoRA adapters (``shrink_rows`` and ``split_rows``)."""
    lora = config.lora_config
    if config.op_table != "fused" or lora.max_adapters == 0:
        return 0
    layers = [
        (-(-len(group) * lora.max_rank // RANK_LANES) * RANK_LANES, -(-group[0].inputs // SHRINK_DEPTH))
        for group in joined_targets(shape)
    ]
    row = ADAPTER_ROW_BYTES + max(ranks * (1 + parts) for ranks, parts in layers) * FLOAT32_BYTES
    copied = 0
    if config.model_config.model_dtype == "bfloat16":
        row += max(ranks for ranks, _ in layers) * 12  # two floats, and the same two numbers in bfloat16
        copied = SHRINK_ROWS * (2 * SHRINK_DEPTH + 64)
    return sum(_rows_of_threads(config, num_threads)) * row + num_threads * (copied + ADAPTER_SLOTS * PAGE_BYTES)


def _mlp_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    if config.op_table != "fused":
        return 0
    tokens, hidden = config.max_num_batched_tokens, shape.hidden_size
    pieces = num_threads * min(tokens, PIECE_ROWS)
    sums = pieces * hidden * FLOAT32_BYTES * len(config.sum_shards)
    return (pieces * shape.intermediate_size + tokens * hidden) * config.dtype_bytes + sums


def _biased_expert_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of an expert's sums before its bias is added (``whole_product`` of ``grouped_matmul.cc``)."""
    if config.op_table != "native" or shape.experts is None or not shape.experts.biased:
        return 0
    rows = min(config.max_num_batched_tokens, PIECE_ROWS)
    return rows * max(2 * shape.experts.intermediate_size, shape.hidden_size) * FLOAT32_BYTES


def _panel_bytes(shape: ModelShape) -> int:
    sums = max(2 * (PIECE_ROWS + 16), _widest(shape) // 8) * PANEL_COLUMNS * FLOAT32_BYTES
    return PANEL_COLUMNS * _widest(shape) + sums


def _latent_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of a prompt's latent vectors in the layout that the kernel of latent attention reads."""
    if shape.latent is None:
        return 0
    keys = (config.max_model_len + 16) * shape.latent.cache_dim * config.dtype_bytes
    return min(MOST_LAID_OUT_BYTES, 2 * keys) + config.max_model_len


def _attention_bytes(shape: ModelShape) -> int:
    return 1024 * (_padded_head(shape) + 48) * FLOAT32_BYTES


def _delta_bytes(config: Config, shape: ModelShape) -> int:
    """Returns the bytes of a thread's buffers in linear attention (``delta_piece`` of ``agent/kernels/ops``)."""
    if shape.delta is None:
        return 0
    delta = shape.delta
    channels = 2 * delta.key_dim + delta.value_dim
    matrix = delta.key_dim * delta.value_dim if config.max_logged_drafts else 0
    rows = 2 * DELTA_PIECE + 2 * delta.taps - 1
    return (rows * channels + DELTA_PIECE * delta.value_dim + matrix) * FLOAT32_BYTES


def _padded_head(shape: ModelShape) -> int:
    size = shape.head_dim if shape.latent is None else shape.latent.cache_dim
    return -(-size // 64) * 64


def _split_context_bytes(config: Config, shape: ModelShape, num_threads: int) -> int:
    rows = min(8 * TASK_ROWS * num_threads, config.max_num_batched_tokens * shape.num_attention_heads)
    partitions = -(-config.max_model_len // PARTITION_TOKENS)
    tasks = 80 * (config.max_step_seqs * shape.num_key_value_heads + rows)
    return rows * partitions * (_padded_head(shape) + 16) * FLOAT32_BYTES + tasks


def _laid_out_bytes(config: Config, shape: ModelShape) -> int:
    if config.op_table != "native":
        return 0
    keys = (config.max_model_len + 16) * shape.num_key_value_heads * shape.head_dim * config.dtype_bytes
    return min(MOST_LAID_OUT_BYTES, 2 * keys) + config.max_model_len
