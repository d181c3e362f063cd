"""Fields that every kind of request shares, with their ranges."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llm_serving.engine.beam_search import MAX_BEAM_WIDTH
from llm_serving.server.limits import (
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_MILLISECONDS,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
)
from llm_serving.server.validation import RequestModel, StopStrings, StrictModel

__all__ = [
    "FrequencyPenalty",
    "MaxTokens",
    "Milliseconds",
    "MinP",
    "Name",
    "PresencePenalty",
    "Priority",
    "RepetitionPenalty",
    "SamplingFields",
    "SchedulingFields",
    "Seed",
    "StreamOptions",
    "Temperature",
    "TokenIds",
    "TopK",
    "TopP",
]

Temperature = Annotated[float | None, Field(ge=0, le=2, description="Randomness; 0 is greedy.")]
TopP = Annotated[float | None, Field(ge=0, le=1, description="Least probable tokens beyond this mass are left out.")]
TopK = Annotated[int | None, Field(ge=-1, le=MAX_TOP_K, description="Only so many best tokens; 0 and -1: all.")]
MinP = Annotated[float | None, Field(ge=0, le=1, description="Least probability, relative to the best token's.")]
RepetitionPenalty = Annotated[float | None, Field(gt=0, le=100, description="Over prompt and output; 1 is none.")]
PresencePenalty = Annotated[float | None, Field(ge=-2, le=2, description="Over tokens of the output.")]
FrequencyPenalty = Annotated[float | None, Field(ge=-2, le=2, description="Over tokens of the output, per occurrence.")]
Seed = Annotated[
    int | None,
    Field(ge=-(2**63), le=2**64 - 1, description="Same seed, same text; random if left out."),
]
MaxTokens = Annotated[int | None, Field(ge=1, description="Most tokens to generate.")]
Priority = Annotated[
    int | None,
    Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Smaller is served earlier among equally urgent ones."),
]
Milliseconds = Annotated[float | None, Field(gt=0, le=MAX_MILLISECONDS)]
Name = Annotated[str | None, Field(max_length=MAX_NAME_CHARS)]
TokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]


class SchedulingFields(RequestModel):
    """How urgent a request is, and what it wants to know of how it was served. Nothing here changes its text."""

    priority: Priority = None
    ttft_objective_ms: Milliseconds = Field(
        default=None, description="Time to the first token that is good enough (default: the server's)."
    )
    tbt_objective_ms: Milliseconds = Field(
        default=None, description="Time between tokens that is good enough (default: the server's)."
    )
    deadline_ms: Milliseconds = Field(
        default=None, description="Drop the request (504) if it has not begun so long after it came."
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_NAME_CHARS,
        description="Share the prefix cache only with requests that have the same.",
    )
    return_receipt: bool | None = Field(default=None, description="Add `receipt`: where the time went.")


class StreamOptions(StrictModel):
    """How to stream."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(default=None, description="Send a last chunk with the token counts.")


class SamplingFields(SchedulingFields, StrictModel):
    """OpenAI's sampling parameters, and this server's additions in the names vLLM uses."""

    model: Name = Field(default=None, description="Name of the served model; may be left out.")
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    stream: bool | None = Field(default=None, description="Send the text as it comes, as server-sent events.")
    stream_options: StreamOptions | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    stop: StopStrings = ()
    stop_token_ids: TokenIds | None = Field(default=None, description="Token ids that end the text.")
    ignore_eos: bool | None = Field(default=None, description="Do not end at the model's end token.")
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text (default true)."
    )
    include_stop_str_in_output: bool | None = Field(default=None, description="Keep the stop string in the text.")
    use_beam_search: bool | None = Field(
        default=None, description="Return the likeliest answers, as beam search finds them; not streamed."
    )
    beam_width: int | None = Field(
        default=None, ge=1, le=MAX_BEAM_WIDTH, description="Beams of a beam search (default: the value of `n`)."
    )
    length_penalty: float | None = Field(
        default=None,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="Of a beam search: beams compare by their log-probability / length ** this (default 1).",
    )
    return_token_ids: bool | None = Field(
        default=None, description="Add `token_ids` and `prompt_token_ids` to each choice."
    )
