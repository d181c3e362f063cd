"""Request bodies of the published dialects: ``/generate``, ``/generate_stream``, ``/chat``, ``/stream_chat_post``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from llm_serving.request import MAX_TOP_LOGITS
from llm_serving.server.limits import MAX_MESSAGES, MAX_NAME_CHARS
from llm_serving.server.protocol import (
    FrequencyPenalty,
    MaxTokens,
    RepetitionPenalty,
    SchedulingFields,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from llm_serving.server.validation import LaxModel, StopStrings

__all__ = [
    "ChatDialectRequest",
    "DialectSampling",
    "GenerateParameters",
    "GenerateRequest",
    "GenerationSettings",
    "Turn",
]

Role = Literal["system", "user", "assistant"]


class DialectSampling(LaxModel):
    """What both dialects say about sampling."""

    do_sample: bool | None = Field(
        default=None,
        description="Sample, or take the best token. Default: sample if temperature, top_k or top_p is given.",
    )
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    repetition_penalty: RepetitionPenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    stop: StopStrings = ()
    return_logits: bool | None = Field(
        default=None, description=f"Return the top {MAX_TOP_LOGITS} ids and logits of each step."
    )


class GenerateParameters(DialectSampling):
    """``parameters`` of ``/generate``."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "best_of": (None, 1),
        "truncate": (None, False, "False"),
        "typical_p": (None, 0, 1),
        "watermark": (None, False, "False"),
        "decoder_input_details": (None, False, "False"),
        "grammar": (None,),
        "adapter_id": (None,),
    }
    ignored = frozenset({"return_protocol"})

    max_new_tokens: MaxTokens = Field(
        default=None, description="Most tokens to generate (default 300, or what there is room for)."
    )
    return_full_text: bool | None = Field(default=None, description="Put the prompt before `generated_text`.")
    details: bool | None = Field(default=None, description="Return the tokens with their log-probabilities.")
    top_n_tokens: int | None = Field(
        default=None, ge=0, le=MAX_TOP_LOGITS, description="So many best tokens, in details and in a stream."
    )


class GenerateRequest(SchedulingFields, LaxModel):
    """A prompt to be continued."""

    inputs: Annotated[str, Field(description="The prompt.")]
    parameters: GenerateParameters | None = None
    stream: bool | None = Field(default=None, description="On `/generate`: answer as `/generate_stream` does.")


class Turn(LaxModel):
    """One turn of ``history``."""

    role: Role
    content: str


def _turns(value: object) -> object:
    """``history`` as a list of turns: it may hold ``{role, content}`` objects or ``[query, answer]`` pairs."""
    if value is None:
        return []
    if not isinstance(value, list):
        return value
    turns: list[object] = []
    for i, entry in enumerate(value):
        if isinstance(entry, list):
            if len(entry) != 2 or not all(isinstance(text, str) for text in entry):
                raise PydanticCustomError(
                    "history_pair", f"holds an entry [{i}] that is no [query, answer] pair of strings"
                )
            turns += [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
        else:
            turns.append(entry)
    return turns


History = Annotated[
    list[Turn],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_turns),
    WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": "object"}, {"type": "array"}]}}),
]


class GenerationSettings(DialectSampling):
    """``gen_kwargs`` of ``/chat``."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "num_beams": (None, 1),
        "num_return_sequences": (None, 1),
    }

    max_length: MaxTokens = Field(default=None, description="Most tokens to generate.")
    max_new_tokens: MaxTokens = Field(default=None, description="Most tokens to generate; the smaller of the two wins.")
    prefix_text: str | None = Field(default=None, description="How the reply starts; it is continued and not repeated.")


class ChatDialectRequest(SchedulingFields, LaxModel):
    """One question in a conversation."""

    request_id: Annotated[
        str | None,
        BeforeValidator(lambda value: str(value) if type(value) is int else value),
        Field(max_length=MAX_NAME_CHARS, description="Returned with the answer."),
    ] = None
    query: str
    role: Role = Field(default="user", description="Who asks.")
    history: History = Field(default=[], description="Turns before: {role, content} objects or [query, answer] pairs.")
    gen_kwargs: GenerationSettings | None = None
    stream: bool | None = Field(default=None, description="On `/chat`: answer as `/stream_chat_post` does.")
