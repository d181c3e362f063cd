"""What the simulated clients ask: the load test's generator, a data set, a trace, or the requests of a former run."""

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
    """Requests and when they are sent, in seconds from the start."""

    requests: Sequence[SimulatedRequest]
    times: Sequence[float]

    @property
    def duration(self) -> float:
        return self.times[-1] if self.times else 0.0


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a trace: when it came, and its tokens or their number. ``max_tokens`` defaults to the output."""

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
    """What the load test with these options sends, at its moments. Text goes through the deployment's tokenizer."""
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
    """What goodput counts is what the requests ask for: seconds to the first token, seconds between tokens."""
    between_ms = options.slo_tpot_ms if options.slo_tbt_ms is None else options.slo_tbt_ms
    return options.slo_ttft_ms / 1000.0, between_ms / 1000.0


def _encoder(config: Config) -> Encode:
    """Raises UsageError when the deployment's tokenizer is not here."""
    from llm_serving.engine.tokenizer import load_tokenizer

    if config.model_config.load_format == "dummy" and "shapes" in config.tokenizer_file:
        raise UsageError(
            f"{config.model_name}: text prompts need the model's tokenizer, which is not here (tokenizer.vocab_file);"
            " ask for token ids instead"
        )
    tokenizer = load_tokenizer(config)

    def encode(asked: LoadRequest) -> Sequence[int]:
        if asked.text is not None:
            return tokenizer.encode(asked.text)
        assert asked.messages is not None
        return tokenizer.encode(tokenizer.render_chat(list(asked.messages)), add_special_tokens=False)

    return encode


def of_trace(path: Path, options: LoadOptions) -> Arrivals:
    """A JSONL trace, see ``TraceLine``. Prompts of which only the length is known share no prefix. Raises UsageError
    naming the line."""
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
                raise msgspec.ValidationError("a request has at least 1 prompt and 1 output token")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        lines.append(line)
    if not lines:
        raise UsageError(f"--trace: {path} holds no line")
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
    """The requests of a load test's JSON that succeeded, as they were sent: late ones late, answers as long as they
    were. Raises UsageError when it holds none."""
    generator = random.Random(f"prompts/{options.seed}")
    ttft, tbt = _objectives(options)
    sent = []
    for one in content["per_request"]:
        if one["failure"] is None and one["output_tokens"]:
            length = one["prompt_tokens"]
            if length is None:
                raise UsageError("the load test's server did not say how many tokens the prompts have")
            tokens = some_tokens(length, generator)
            request = SimulatedRequest(tokens, one["output_tokens"], ttft_objective=ttft, tbt_objective=tbt)
            sent.append((one["due_s"] + one["lateness_ms"] / 1000.0, request))
    if not sent:
        raise UsageError("no request of the load test succeeded")
    sent.sort(key=lambda pair: pair[0])
    return Arrivals([request for _, request in sent], [time for time, _ in sent])


def some_tokens(count: int, generator: random.Random) -> tuple[int, ...]:
    """A prompt that shares nothing with any other."""
    return tuple(generator.choices(range(FIRST_PLAIN_TOKEN, 30_000), k=count))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--trace: cannot read {path}: {error.strerror}") from error
