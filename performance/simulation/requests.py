"""Creates the requests of a simulation: generated as in the load test, from a trace, or from a real load test."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llm_serving.config import Config
from performance.load.options import LoadOptions
from performance.load.workload import FIRST_PLAIN_TOKEN, LoadRequest
from performance.program import UsageError
from performance.simulation.workload import SimulatedRequest

__all__ = ["Arrivals", "generated", "of_load_test", "of_trace", "some_tokens"]

Encode = Callable[[LoadRequest], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests of a simulation, and their arrival times in seconds from the start."""

    requests: Sequence[SimulatedRequest]
    times: Sequence[float]

    @property
    def duration(self) -> float:
        return self.times[-1] if self.times else 0.0


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a trace: its arrival time, and either its prompt or the length of its prompt.

    ``max_tokens`` is the maximum number of output tokens. Without it, ``output_tokens`` is the maximum.
    """

    arrival_s: float
    output_tokens: int
    prompt_tokens: int | None = None
    prompt: tuple[int, ...] | None = None
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    ttft_objective_ms: float | None = None
    tbt_objective_ms: float | None = None


def generated(options: LoadOptions, config: Config) -> Arrivals:
    """Returns the requests that a load test with these options sends. The config's tokenizer encodes their text."""
    asked = options.requests(options.count, options.seed)
    encode = _encoder(config) if any(each.token_ids is None for each in asked) else None
    return Arrivals([_request(each, encode, options) for each in asked], options.arrival_times())


def _request(asked: LoadRequest, encode: Encode | None, options: LoadOptions) -> SimulatedRequest:
    tokens = asked.token_ids
    if tokens is None:
        assert encode is not None
        tokens = tuple(encode(asked))
    ttft, tbt = _objectives(options)
    return SimulatedRequest(tokens, asked.max_tokens, ttft_objective=ttft, tbt_objective=tbt)


def _objectives(options: LoadOptions) -> tuple[float, float]:
    """Returns the objectives that goodput uses, in seconds: time to first token, and time between tokens."""
    between_ms = options.slo_tpot_ms if options.slo_tbt_ms is None else options.slo_tbt_ms
    return options.slo_ttft_ms / 1000.0, between_ms / 1000.0


def _encoder(config: Config) -> Encode:
    """Returns the function that encodes a request. Raises UsageError if the model's tokenizer is missing."""
    from llm_serving.engine.tokenizer_backends import load_tokenizer

    if config.model_config.load_format == "dummy" and "shapes" in config.tokenizer_file:
        raise UsageError(
            f"{config.model_name}: text prompts need the model's tokenizer, which is missing (tokenizer.vocab_file);"
            " use token ids instead"
        )
    tokenizer = load_tokenizer(config)

    def encode(asked: LoadRequest) -> Sequence[int]:
        if asked.text is not None:
            return tokenizer.encode(asked.text)
        assert asked.messages is not None
        return tokenizer.encode(tokenizer.chat_template.render(list(asked.messages)), add_special_tokens=False)

    return encode


def of_trace(path: Path, options: LoadOptions) -> Arrivals:
    """Reads a JSONL trace of ``TraceLine`` objects. If only a prompt's length is known, its tokens are random.

    Raises UsageError with the number of the wrong line.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    lines = []
    for number, raw in enumerate(_lines(path), 1):
        if not raw.strip():
            continue
        try:
            line = decoder.decode(raw)
            if (line.prompt is None) == (line.prompt_tokens is None):
                raise msgspec.ValidationError("give either 'prompt' (token ids) or 'prompt_tokens' (their number)")
            if line.output_tokens < 1 or (line.prompt_tokens is not None and line.prompt_tokens < 1):
                raise msgspec.ValidationError("a request needs at least 1 prompt token and 1 output token")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        lines.append(line)
    if not lines:
        raise UsageError(f"--trace: {path} is empty")
    lines.sort(key=lambda line: line.arrival_s)
    generator = random.Random(f"prompts/{options.seed}")
    start = lines[0].arrival_s
    requests = [_traced(line, generator, options) for line in lines]
    return Arrivals(requests, [line.arrival_s - start for line in lines])


def _traced(line: TraceLine, generator: random.Random, options: LoadOptions) -> SimulatedRequest:
    default_ttft, default_tbt = _objectives(options)
    ttft, tbt = line.ttft_objective_ms, line.tbt_objective_ms
    return SimulatedRequest(
        line.prompt if line.prompt is not None else some_tokens(line.prompt_tokens or 1, generator),
        line.max_tokens or line.output_tokens,
        line.output_tokens,
        line.priority,
        line.tenant,
        default_ttft if ttft is None else ttft / 1000.0,
        default_tbt if tbt is None else tbt / 1000.0,
    )


def of_load_test(content: dict[str, Any], options: LoadOptions) -> Arrivals:
    """Returns the successful requests of a load test's JSON, at the times at which they were really sent.

    The outputs of these requests have the measured lengths. Raises UsageError if no request succeeded.
    """
    generator = random.Random(f"prompts/{options.seed}")
    ttft, tbt = _objectives(options)
    sent = []
    for one in content["per_request"]:
        if one["failure"] is None and one["output_tokens"]:
            length = one["prompt_tokens"]
            if length is None:
                raise UsageError("the load test's server did not report the number of prompt tokens")
            tokens = some_tokens(length, generator)
            request = SimulatedRequest(tokens, one["output_tokens"], ttft_objective=ttft, tbt_objective=tbt)
            sent.append((one["due_s"] + one["lateness_ms"] / 1000.0, request))
    if not sent:
        raise UsageError("no request of the load test succeeded")
    sent.sort(key=lambda pair: pair[0])
    return Arrivals([request for _, request in sent], [time for time, _ in sent])


def some_tokens(count: int, generator: random.Random) -> tuple[int, ...]:
    """Returns ``count`` random token ids, so that prompts do not share a prefix."""
    return tuple(generator.choices(range(FIRST_PLAIN_TOKEN, 30_000), k=count))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--trace: cannot read {path}: {error.strerror}") from error
