"""The request bodies of the open inference protocol, converted to completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError

from llm_serving.errors import RequestError
from llm_serving.server.fields.validation import StrictModel, request_error, short
from llm_serving.server.limits import MAX_NAME_CHARS, MAX_PROMPTS
from llm_serving.server.openai.completions import CompletionRequest

TEXT_INPUT = "text_input"
INPUT_IDS = "input_ids"
TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
EXCLUDE_INPUT = "exclude_input_in_output"

_INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_FLOATS = ("FP16", "FP32", "FP64")
_REFUSED = frozenset(
    ("model", "prompt", "n", "best_of", "stream_options", "use_beam_search", "beam_width", "length_penalty", "echo",
     "logprobs", "prompt_logprobs", "return_token_ids", "return_receipt")
)  # fmt: skip
"""Fields of a completion that are refused, because responses of this protocol have no members for their results."""

Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class GenerateExtensionRequest(StrictModel):
    """Request body of ``/v2/models/{name}/generate``: a prompt to continue."""

    id: Name | None = Field(default=None, description="Returned with the response.")
    text_input: str = Field(description="The prompt.")
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of `/v1/completions`, for example `max_tokens`. `exclude_input_in_output`: return only "
        "the new text (default: false; a stream always has only new text).",
    )


class InputTensor(StrictModel):
    """One input tensor, whose data is JSON."""

    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=4)]
    datatype: Name = Field(description="`BYTES` for text, or a type of numbers, for example `INT32`.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Must be empty.")
    data: list[Any] = Field(description="The elements in row-major order, flat or nested.")


class OutputTensor(StrictModel):
    """The name of an output tensor that the client wants."""

    name: Name
    parameters: dict[str, Any] = Field(default_factory=dict, description="Must be empty.")


class InferRequest(StrictModel):
    """Request body of ``/v2/models/{name}/infer``: prompts and parameters as tensors."""

    id: Name | None = Field(default=None, description="Returned with the response.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Fields of `/v1/completions`.")
    inputs: Annotated[list[InputTensor], Field(min_length=1, max_length=32)] = Field(
        description="`text_input` (BYTES [n] or [n, 1]) or `input_ids` (INT32 or INT64 [n, length]); parameters as "
        "tensors with one element, for example `max_tokens`."
    )
    outputs: Annotated[list[OutputTensor], Field(max_length=8)] | None = Field(
        default=None, description="`text_output` and `finish_reason` (default: both)."
    )


def completion_of(
    model: str, prompts: str | Sequence[object], parameters: Mapping[str, Any], *, stream: bool
) -> tuple[CompletionRequest, bool]:
    """Converts ``prompts`` and ``parameters`` to a request of ``/v1/completions``. Also returns whether the response
    must leave out the prompt.

    Raises RequestError if the request is wrong.
    """
    fields = dict(parameters)
    exclude = fields.pop(EXCLUDE_INPUT, False)
    if not isinstance(exclude, bool):
        raise _wrong(f"parameters.{EXCLUDE_INPUT}", "true or false", exclude)
    if fields.pop("stream", None) not in (None, stream):
        raise RequestError(
            "'parameters.stream' contradicts the URL: /generate_stream sends a stream, /generate and /infer do not.",
            param="parameters.stream",
            code="invalid_value",
        )
    for name in sorted(fields.keys() & _REFUSED):
        raise RequestError(
            f"'parameters.{name}' is not supported by this protocol; use /v1/completions.",
            param=f"parameters.{name}",
            code="unsupported_parameter",
        )
    try:
        completion = CompletionRequest.model_validate({**fields, "model": model, "prompt": prompts, "stream": stream})
    except ValidationError as error:
        raise named_by_parameters(request_error(error)) from None
    return completion, exclude or stream


def completion_of_tensors(model: str, body: InferRequest) -> tuple[CompletionRequest, bool]:
    """Converts the tensors of a request to a request of ``/v1/completions``. Returns what ``completion_of`` returns."""
    prompts, parameters = read_tensors(body)
    return completion_of(model, prompts, parameters, stream=False)


def named_by_parameters(error: RequestError) -> RequestError:
    """Returns the error with the field's name in the client's request: ``parameters.FIELD`` instead of ``FIELD``.

    An error about the prompt is returned unchanged.
    """
    if error.param is None or error.param.startswith("prompt"):
        return error
    text, param = str(error), f"parameters.{error.param}"
    return RequestError(text.replace(f"'{error.param}'", f"'{param}'"), param=param, code=error.code)


def read_tensors(body: InferRequest) -> tuple[list[object], dict[str, Any]]:
    """Returns the prompts, and the parameters of the body and of its tensors. Raises RequestError."""
    prompts: list[object] | None = None
    parameters = dict(body.parameters)
    for i, tensor in enumerate(body.inputs):
        where = f"inputs[{i}]"
        values = _elements(tensor, where)
        if tensor.name in (TEXT_INPUT, INPUT_IDS):
            if prompts is not None:
                raise RequestError("'inputs' has the prompts twice; send 'text_input' or 'input_ids'.", param="inputs",
                                   code="invalid_value")  # fmt: skip
            prompts = _texts(tensor, values, where) if tensor.name == TEXT_INPUT else _ids(tensor, values, where)
        elif tensor.name in parameters:
            raise RequestError(
                f"'{where}' repeats the parameter {short(tensor.name)}.", param=where, code="invalid_value"
            )
        else:
            parameters[tensor.name] = _parameter(tensor, values, where)
    if prompts is None:
        raise RequestError(
            "'inputs' needs the tensor 'text_input' or 'input_ids'.", param="inputs", code="missing_required_parameter"
        )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(
            f"'inputs' has {len(prompts)} prompts; it should be 1 to {MAX_PROMPTS}.", param="inputs",
            code="invalid_value",
        )  # fmt: skip
    return prompts, parameters


def wanted_outputs(body: InferRequest) -> list[str]:
    """Returns the names of the output tensors that the client wants. Raises RequestError for unknown names."""
    known = [TEXT_OUTPUT, FINISH_REASON]
    if not body.outputs:
        return known
    for i, output in enumerate(body.outputs):
        if output.name not in known or output.parameters:
            raise RequestError(
                f"'outputs[{i}]' is {short(output.name)}; the outputs are {' and '.join(known)}, without parameters.",
                param=f"outputs[{i}]",
                code="invalid_value",
            )
    return [name for name in known if any(output.name == name for output in body.outputs)]


def _elements(tensor: InputTensor, where: str) -> list[object]:
    """Checks type, number and shape of a tensor's elements, and returns them as one flat list."""
    if tensor.parameters:
        raise RequestError(
            f"'{where}.parameters' is not supported; send the data as JSON in 'data'.",
            param=f"{where}.parameters",
            code="unsupported_parameter",
        )
    check = _CHECKS.get(tensor.datatype)
    if check is None:
        raise _wrong(f"{where}.datatype", f"one of {', '.join(_CHECKS)}", tensor.datatype)
    size = 1
    for length in tensor.shape:
        size *= length
    values = list(_flat(tensor.data, len(tensor.shape), f"{where}.data"))
    if len(values) != size:
        raise RequestError(
            f"'{where}' has the shape {tensor.shape}, which is {size} elements, and {len(values)} elements of data.",
            param=where,
            code="invalid_value",
        )
    wrong = next((value for value in values if not check(value)), None)
    if wrong is not None or None in values:
        raise _wrong(f"{where}.data", f"elements of the type {tensor.datatype}", wrong)
    return values


def _flat(data: Sequence[Any], depth: int, where: str) -> list[object]:
    found: list[object] = []
    for each in data:
        if not isinstance(each, list):
            found.append(each)
        elif depth > 1:
            found += _flat(each, depth - 1, where)
        else:
            raise _wrong(where, "nested at most as deep as the shape", each)
    return found


def _texts(tensor: InputTensor, values: list[object], where: str) -> list[object]:
    if tensor.datatype != "BYTES" or len(tensor.shape) > 2 or (len(tensor.shape) == 2 and tensor.shape[1] != 1):
        raise RequestError(
            f"'{where}' should be BYTES with the shape [n] or [n, 1]; got {tensor.datatype} {tensor.shape}.",
            param=where,
            code="invalid_value",
        )
    return values


def _ids(tensor: InputTensor, values: list[object], where: str) -> list[object]:
    if tensor.datatype not in _INTEGERS or len(tensor.shape) > 2 or not tensor.shape[-1]:
        raise RequestError(
            f"'{where}' should be integers with the shape [n, length]; got {tensor.datatype} {tensor.shape}.",
            param=where,
            code="invalid_value",
        )
    length = tensor.shape[-1]
    return [values[begin : begin + length] for begin in range(0, len(values), length)]


def _parameter(tensor: InputTensor, values: list[object], where: str) -> object:
    """Returns the value of a parameter that the client sent as a tensor.

    Stop strings and token ids are lists; other parameters have one element.
    """
    if tensor.name in _LISTS:
        return values
    if len(values) != 1:
        raise RequestError(
            f"'{where}' is the parameter {short(tensor.name)}, which has one element for all prompts; got "
            f"{len(values)}.",
            param=where,
            code="invalid_value",
        )
    return values[0]


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "BYTES": lambda value: isinstance(value, str),
    "BOOL": lambda value: isinstance(value, bool),
    **dict.fromkeys(_INTEGERS, _is_integer),
    **dict.fromkeys(_FLOATS, _is_number),
}
"""Maps a tensor's datatype to the check of its JSON values."""


def _wrong(param: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"'{param}' should be {wanted}; got {short(value)}.", param=param, code="invalid_type")
