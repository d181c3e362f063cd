"""The fields of structured output: ``response_format`` of OpenAI, and ``structured_outputs`` with vLLM's names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from llm_serving.constraints.grammar import MAX_CHOICES
from llm_serving.server.fields.validation import StrictModel
from llm_serving.server.limits import MAX_NAME_CHARS


class JsonSchemaFormat(StrictModel):
    """A JSON schema with its name."""

    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS, description="Name of the schema; has no effect.")
    description: str | None = Field(default=None, description="Description of the schema; has no effect.")
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema", description="The JSON schema.")
    strict: bool | None = Field(default=None, description="Has no effect: the schema is always enforced.")


class ResponseFormat(StrictModel):
    """OpenAI's field ``response_format``, which asks for structured output."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="The kind of text.")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="The schema of `json_schema`.")


class StructuredOutputs(StrictModel):
    """vLLM's field ``structured_outputs``. Exactly one of its members must be given."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: str | None = Field(default=None, description="A regular expression for the whole text.")
    choice: list[str] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICES, description="The text is one of these strings."
    )
    grammar: str | None = Field(default=None, description="A grammar in llguidance's dialect of Lark.")


class StructuredFields(StrictModel):
    """The fields that constrain the text of a response."""

    response_format: ResponseFormat | None = Field(
        default=None, description="Generate JSON: any object (`json_object`), or what fits a schema (`json_schema`)."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="Generate text that fits `json`, `regex`, `choice` or `grammar`."
    )
