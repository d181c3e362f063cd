"""Turns the prompts of requests (text, or token ids) into token ids, and checks their lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from llm_serving.engine.chat_template import SHORT, TemplateBudgetError
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.images.prompt import PromptImages
from llm_serving.parsing.described import describe_tools
from llm_serving.parsing.formats import DEFAULT_TOOL_FORMAT, OutputFormat
from llm_serving.server.fields.prompt_end import cut_at_mark, with_mark
from llm_serving.server.fields.shared import Message
from llm_serving.server.fields.tools import with_text_arguments
from llm_serving.server.fields.validation import short
from llm_serving.server.generation.images import ReadImages
from llm_serving.server.generation.work import call_entries, check_work, off_loop
from llm_serving.server.limits import (
    INLINE_CHAT_CHARS,
    INLINE_MESSAGES,
    INLINE_TOKENIZE_CHARS,
    MAX_PROMPTS,
    MAX_SEQUENCES,
)
from llm_serving.server.state import ServerSettings, ServerState


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids. ``text`` is None if the client sent token ids."""

    token_ids: Sequence[int]
    text: str | None = None
    images: PromptImages | None = None
    """The images of the prompt. None if the prompt has no images."""
    continued: str | None = None
    """The text of the last message, if the output continues this message (``continue_final_message``)."""

    def work(self) -> int:
        """Returns the work of the prefill in tokens: the number of tokens plus the cost of encoding each image tile."""
        return len(self.token_ids) + (0 if self.images is None else sum(tile.cost for tile in self.images.tiles))

    def as_text(self, tokenizer: Tokenizer) -> str:
        """Returns the text of the prompt, which ``echo`` puts before the output."""
        return tokenizer.decode(self.token_ids) if self.text is None else self.text


async def read_prompts(state: ServerState, value: object, n: int) -> list[Prompt]:
    """Returns the prompts in the field ``prompt`` as token ids.

    ``value`` is one prompt or a list of prompts. A prompt is a text or a list of token ids. Another thread checks long
    lists. ``n`` is the number of sequences for each prompt. Raises RequestError.
    """
    check_lengths(value, n, state.settings)
    num_items = sum(len(one) if isinstance(one, list) else 1 for one in value) if isinstance(value, list) else 1
    prompts = await off_loop(num_items, partial(parse_prompts, value))
    check_choices(len(prompts), n)
    return await resolve_prompts(state, prompts, "prompt")


def check_lengths(value: object, n: int, settings: ServerSettings, param: str = "prompt") -> None:
    """Raises RequestError if the number of prompts or of token ids is too high, before the prompts are examined.

    ``param`` is the name of their field.
    """
    if not isinstance(value, list):
        return
    if value and not isinstance(value[0], list | str):
        check_prompt(len(value), settings, param)
        return
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"'{param}' holds {len(value)} prompts; the maximum is {MAX_PROMPTS}.", param=param, code="invalid_value"
        )
    for i, entry in enumerate(value):
        if isinstance(entry, list):
            check_prompt(len(entry), settings, f"{param}[{i}]")
    check_work(settings, [(len(entry), 0) for entry in value if isinstance(entry, list)], n)


def parse_prompts(value: object, param: str = "prompt") -> list[str | list[int]]:
    """Returns the list of prompts in the field ``param``, each a text or a list of token ids.

    ``value`` is one prompt or a list of prompts. Raises RequestError if it is neither.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong_prompt(param, value)
    if not value:
        raise RequestError(f"'{param}' is an empty list; give at least one.", param=param, code="invalid_value")
    if type(value[0]) is int:
        return [_token_list(value, param)]
    prompts: list[str | list[int]] = []
    for i, entry in enumerate(value):
        if isinstance(entry, str):
            prompts.append(entry)
        elif isinstance(entry, list):
            prompts.append(_token_list(entry, f"{param}[{i}]"))
        else:
            raise _wrong_prompt(f"{param}[{i}]", entry)
    return prompts


async def resolve_prompts(state: ServerState, prompts: Sequence[str | list[int]], param: str) -> list[Prompt]:
    """Returns the prompts as token ids. Raises RequestError for an unknown token id, or if a prompt is too long."""
    inline = sum(len(prompt) for prompt in prompts) <= INLINE_TOKENIZE_CHARS
    names = [param] if len(prompts) == 1 else [f"{param}[{i}]" for i in range(len(prompts))]
    return [await _resolve(state, prompt, name, inline) for prompt, name in zip(prompts, names, strict=True)]


async def encode_text(
    state: ServerState, text: str, param: str, *, add_special_tokens: bool = True, inline: bool = True
) -> list[int]:
    """Returns the token ids of a text. A text that cannot fit the context is refused before it is tokenized.

    A long text is tokenized in another thread, so that it does not delay other requests. With ``inline=False``, another
    thread tokenizes texts of any length. Errors name the field ``param``.
    """
    return await _encode(state, text, param, add_special_tokens, inline=inline)


async def _encode(state: ServerState, text: str, param: str, add_special_tokens: bool, *, inline: bool) -> list[int]:
    tokenizer = state.engine.tokenizer
    maximum = max_chars(state)
    if len(text) > maximum:
        raise ContextLengthError(
            f"'{param}' has {len(text)} characters; more than {maximum} cannot fit {state.settings.max_context} tokens."
            " Shorten it.",
            param=param,
        )
    if inline and len(text) <= INLINE_TOKENIZE_CHARS:
        ids = tokenizer.encode(text, add_special_tokens)
    else:
        ids = await asyncio.get_running_loop().run_in_executor(None, tokenizer.encode, text, add_special_tokens)
    if tokenizer.vocab_size > state.settings.vocab_size:
        check_vocabulary(ids, state.settings.vocab_size, param)
    return ids


async def encode_chat(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continues: bool = False,
    add_special_tokens: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    template_values: Mapping[str, Any] | None = None,
    suffix: str = "",
    images: ReadImages | None = None,
) -> Prompt:
    """Returns the prompt of a conversation: the text of the chat template, followed by ``suffix``.

    With ``continues``, the prompt ends after the text of the last message, see ``PromptEndFields``.
    If the template does not render ``tools``, the system message describes the tools. ``template_values`` are
    further variables for the template. ``images`` are the images of the messages. Long conversations and slow templates
    are rendered in another thread. Raises RequestError if there is no chat template, if the template fails on the
    messages, or if the prompt cannot fit the context.
    """
    is_short = _is_short(messages, tools)
    messages = with_mark(messages) if continues else messages
    template = state.engine.tokenizer.chat_template
    has_tools = bool(tools) or any(map(_has_calls, messages))
    if has_tools:
        template = state.engine.tokenizer.tool_template or template
    prepare = partial(_prepared, state.output_format, messages, tools, has_tools=has_tools)
    messages, tools = await off_loop(0 if is_short else 1, prepare, limit=0)
    render = partial(
        template.render,
        messages if state.settings.vision is None else [_in_parts(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        values=template_values,
        max_chars=max_chars(state),
        day=state.settings.template_day,
    )
    text = None
    if is_short and state.renders_inline:
        try:
            text = render(allowance=SHORT)
        except TemplateBudgetError:
            state.renders_inline = False
    if text is None:
        text = await asyncio.get_running_loop().run_in_executor(None, render)
    text = (cut_at_mark(text) if continues else text) + suffix
    if images is not None:
        text = images.in_text(text)
    ids = await _encode(state, text, "messages", add_special_tokens, inline=True)
    if images is None:
        return Prompt(ids, text)
    check_prompt(len(ids), state.settings, "messages")
    return Prompt(ids, text, await images.placed(ids))


async def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages of a request as the input of ``encode_chat``.

    If there are many messages or tool calls, or if the arguments of calls are long, another thread converts them.
    """
    calls = [call for message in messages for call in message.tool_calls or ()]
    num_entries = len(messages) + sum(call_entries(len(call.function.arguments)) for call in calls)
    return await off_loop(num_entries, lambda: [message.for_template() for message in messages], INLINE_MESSAGES)


def _prepared(
    output_format: OutputFormat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    has_tools: bool,
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Returns messages and tools in the form that the chat template expects."""
    if has_tools and not output_format.template_has_tools:
        return describe_tools(messages, tools, output_format.tools or DEFAULT_TOOL_FORMAT), ()
    if output_format.arguments_are_text:
        return with_text_arguments(messages), tools
    return messages, tools


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of parts, as the templates of models that read images expect it."""
    others = {key: value for key, value in message.items() if key != "parts"}
    return {**others, "content": message.get("parts") or [{"type": "text", "text": message["content"] or ""}]}


def _has_calls(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _is_short(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a conversation with its tools is short enough for the event loop's thread to render it.

    One limit is for the number of messages and tool calls. The other limit is for their size: the characters of the
    messages plus the bytes of tools and calls as JSON.
    """
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    size = sum(len(message["content"] or "") for message in messages)
    if len(messages) + len(calls) > INLINE_MESSAGES:
        return False
    for value in (tools, *calls):
        if size > INLINE_CHAT_CHARS:
            return False
        try:
            size += len(orjson.dumps(value))
        except orjson.JSONEncodeError:  # a number of more than 64 bits
            return False
    return size <= INLINE_CHAT_CHARS


def max_chars(state: ServerState) -> int:
    """Returns the maximum number of characters of a text that can fit the context.

    A longer text has too many tokens, because the text of every token has a maximum length.
    """
    return state.settings.max_context * state.engine.tokenizer.max_piece_chars


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises RequestError for a token id outside the model's vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise RequestError(
            f"'{param}[{wrong}]' is token id {ids[wrong]}; the model's vocabulary has ids 0 to {vocab_size - 1}.",
            param=param,
            code="invalid_value",
        )


def check_prompt(num_tokens: int, settings: ServerSettings, param: str) -> None:
    """Raises ContextLengthError if a prompt with ``num_tokens`` tokens leaves no space for an output."""
    if num_tokens > settings.max_prompt_tokens:
        raise ContextLengthError(
            f"The prompt has {num_tokens} tokens; the maximum is {settings.max_prompt_tokens} "
            "(model_config.seq_length). Shorten it.",
            param=param,
        )
    if num_tokens >= settings.max_context:
        raise ContextLengthError(
            f"This model's maximum context length is {settings.max_context} tokens, and the prompt has {num_tokens}, "
            "which leaves no space for an output. Shorten it.",
            param=param,
        )


def max_output_tokens(num_tokens: int, max_tokens: int | None, settings: ServerSettings, param: str) -> int:
    """Returns the maximum number of output tokens after a prompt with ``num_tokens`` tokens.

    It is ``max_tokens``, or the rest of the context if ``max_tokens`` is None. Raises ContextLengthError, which names
    the field ``param``, if prompt and output do not fit the context.
    """
    available = settings.max_context - num_tokens
    if max_tokens is None:
        return available
    if max_tokens > available:
        raise ContextLengthError(
            f"This model's maximum context length is {settings.max_context} tokens. However, you requested "
            f"{num_tokens + max_tokens} tokens ({num_tokens} in the prompt, {max_tokens} in the output). Shorten the "
            f"prompt or lower {param}.",
            param=param,
        )
    return max_tokens


def check_choices(num_prompts: int, n: int) -> None:
    """Raises RequestError if one HTTP request would make too many sequences."""
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} make {num_prompts * n} sequences; the maximum for one request is "
            f"{MAX_SEQUENCES}.",
            param="n",
            code="invalid_value",
        )


def _token_list(value: list[object], param: str) -> list[int]:
    ids = [token for token in value if type(token) is int]
    if len(ids) != len(value):
        wrong = next(i for i, token in enumerate(value) if type(token) is not int)
        raise RequestError(
            f"'{param}[{wrong}]' should be a token id; got {short(value[wrong])}.", param=param, code="invalid_type"
        )
    if not ids:
        raise RequestError(f"'{param}' holds no tokens.", param=param, code="invalid_value")
    return ids


def _wrong_prompt(param: str, value: object) -> RequestError:
    return RequestError(
        f"'{param}' should be text, token ids, or a list of either; got {short(value)}.",
        param=param,
        code="invalid_type",
    )


async def _resolve(state: ServerState, prompt: str | list[int], param: str, inline: bool) -> Prompt:
    if isinstance(prompt, str):
        ids = await encode_text(state, prompt, param, inline=inline)
        if not ids:
            raise RequestError(f"'{param}' is empty.", param=param, code="invalid_value")
    else:
        ids = prompt
        check_vocabulary(ids, state.settings.vocab_size, param)
    check_prompt(len(ids), state.settings, param)
    return Prompt(ids, prompt if isinstance(prompt, str) else None)
