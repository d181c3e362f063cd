"""Measures an engine. The result has a row of rates and times for each batch size and each prefill length."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_serving.config import Config
from llm_serving.model.shape import ModelShape
from performance.bench.ceilings import Ceilings
from performance.bench.engine import OfflineEngine, Times
from performance.bench.roofline import Numbers, decode_seconds, prefill_seconds
from performance.program import parse_count, parse_counts

FIRST_PLAIN_TOKEN = 10
"""Prompts have tokens from this id on. The smaller ids are special tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """A measured load: ``batch`` prompts of ``prompt`` tokens, with ``new`` generated tokens each."""

    kind: str
    """``decode`` or ``prefill``."""
    batch: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}" if self.kind == "decode" else f"prefill {self.batch * self.prompt}"


def median_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the rows of repeated runs. Takes the median of each float, and all other values from the first row."""
    return {
        key: statistics.median(row[key] for row in rows) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }


def prefill_case(tokens: int, longest: int) -> Case:
    """Returns a prefill of ``tokens`` tokens, as one prompt.

    If there are more than ``longest`` tokens, they are divided into as few prompts of equal length as possible.
    """
    count = -(-tokens // longest)
    while tokens % count:
        count += 1
    return Case("prefill", count, tokens // count, 1)


def add_case_options(parser: argparse.ArgumentParser, batches: tuple[int, ...], new: int, repeats: int) -> None:
    """Adds the options that select decode and prefill rows to a parser, with the given defaults."""
    default = ",".join(map(str, batches))
    parser.add_argument("--batch", type=parse_counts, default=batches, help=f"sizes of decode rows (default {default})")
    parser.add_argument("--prompt", type=parse_count, default=64, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--new", type=parse_count, default=new, help="tokens to generate (default %(default)s)")
    parser.add_argument("--prefill", type=parse_counts, default=(1024,), help="tokens of prefill rows (default 1024)")
    parser.add_argument("--repeats", type=parse_count, default=repeats, help="runs of each row (default %(default)s)")


def cases_of(parsed: argparse.Namespace, config: Config) -> list[Case]:
    """Returns the cases that the options of ``add_case_options`` select. Prompts are within the config's limits."""
    longest = min(config.max_prompt_len, config.max_model_len - 1)
    return [
        *(Case("decode", batch, parsed.prompt, parsed.new) for batch in parsed.batch),
        *(prefill_case(tokens, longest) for tokens in parsed.prefill),
    ]


def random_prompts(case: Case, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns random prompts for a case and a seed. No two prompts are equal, so that a prefix cache finds nothing."""
    generator = random.Random(f"bench/{case}/{seed}")
    return [[generator.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(case.prompt)] for _ in range(case.batch)]


def numbers_of(config: Config) -> Numbers:
    """Returns the number formats in which a config's operators compute."""
    model = config.model_config
    return Numbers(model.model_dtype, config.linear_format.name, config.kv_format, model.weight_group)


def measure_case(engine: OfflineEngine, case: Case, config: Config, ceilings: Ceilings, repeats: int) -> dict[str, Any]:
    """Runs a case ``repeats`` times after a warm-up run, and returns the medians of its rates and times."""
    shape, numbers = config.shape, numbers_of(config)
    engine.generate(random_prompts(case, shape.vocab_size, seed=-1), min(case.new, 8))
    rows = []
    for seed in range(repeats):
        times = engine.generate(random_prompts(case, shape.vocab_size, seed), case.new)
        rows.append(figures(case, times, shape, numbers, ceilings))
    shown = ("decode_tokens_per_s", "prefill_tokens_per_s", "end_to_end_tokens_per_s", "ttft_ms")
    return median_row(rows) | {"repeats": [{key: row[key] for key in shown} for row in rows]}


def figures(case: Case, times: Times, shape: ModelShape, numbers: Numbers, ceilings: Ceilings) -> dict[str, Any]:
    """Returns the results of one run as a row of the table. The row is about decode steps or prefill (``case.kind``).

    ``decode_tokens_per_s`` counts the tokens that are generated after every prompt has its first token.
    ``share_of_ceiling`` is the minimum time (``roofline``) divided by the measured time. ``share_by_blocks`` is the
    same ratio for a decode that reads keys and values block by block. ``agent_share`` is the fraction of the measured
    time that the agent spent in graphs and sampler. ``step_ms`` is the mean time of a decode step, or the time of the
    prefill. ``graph_ms`` and ``sample_ms`` are medians over the steps.
    """
    prefill_least = prefill_seconds(shape, [case.prompt] * case.batch, numbers, ceilings)
    is_decode = case.kind == "decode"
    start = times.prefilled if is_decode else 0.0
    seconds = times.end - start
    num_steps = max(1, round(times.decoded_tokens / case.batch)) if is_decode else 1
    least = _decode_least(case, num_steps, shape, numbers, ceilings) if is_decode else prefill_least
    by_blocks = _decode_least(case, num_steps, shape, numbers, ceilings, by_blocks=True) if is_decode else None
    steps = [step for step in times.steps if step.kind == case.kind]
    return {
        "kind": case.kind,
        "batch": case.batch,
        "prompt": case.prompt,
        "new": case.new,
        "decode_tokens_per_s": times.decoded_tokens / seconds if is_decode else None,
        "prefill_tokens_per_s": case.batch * case.prompt / times.prefilled,
        "end_to_end_tokens_per_s": case.batch * case.new / times.end,
        "ttft_ms": 1000.0 * statistics.median(times.first_tokens),
        "share_of_ceiling": least / seconds,
        "share_by_blocks": None if by_blocks is None else by_blocks / seconds,
        "prefill_share_of_ceiling": prefill_least / times.prefilled,
        "agent_share": sum(step.graph_s + step.sample_s for step in steps) / (seconds or 1.0),
        "step_ms": 1000.0 * seconds / num_steps,
        "graph_ms": 1000.0 * _median([step.graph_s for step in steps]),
        "sample_ms": 1000.0 * _median([step.sample_s for step in steps]),
    }


def _decode_least(
    case: Case, steps: int, shape: ModelShape, numbers: Numbers, ceilings: Ceilings, *, by_blocks: bool = False
) -> float:
    """Returns the seconds that the hardware needs at least for the last ``steps`` decode steps of a case.

    All sequences of the case run in these steps.
    """
    first = case.prompt + case.new - steps
    return decode_seconds(shape, case.batch, first, steps, numbers, ceilings, by_blocks=by_blocks)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
