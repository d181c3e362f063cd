"""Renders calls with the libraries of OpenAI and of Mistral. Both are optional: only some environments have them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tools.call_golden.cases import Case

O200K = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
"""Path of the vocabulary ``o200k_base`` in the package litellm. openai-harmony compares its SHA-256."""


@cache
def harmony() -> Any:
    """Returns the encoding of gpt-oss. ``TIKTOKEN_ENCODINGS_BASE`` must name a folder with ``o200k_base.tiktoken``."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def harmony_text(case: Case) -> str:
    """Returns the answer as gpt-oss writes it: the text after ``<|start|>assistant``, to the last marker."""
    from openai_harmony import Message, Role

    messages = [Message.from_role_and_content(Role.ASSISTANT, "Hm.").with_channel("analysis")]
    if case.content:
        messages.append(Message.from_role_and_content(Role.ASSISTANT, case.content).with_channel("commentary"))
    for name, values in case.calls:
        text = json.dumps(values, ensure_ascii=False)
        call = Message.from_role_and_content(Role.ASSISTANT, text).with_channel("commentary")
        messages.append(call.with_recipient(f"functions.{name}").with_content_type("<|constrain|>json"))
    encoding = harmony()
    text = "".join(encoding.decode(encoding.render(message)) for message in messages)
    assert text.startswith("<|start|>assistant")
    return text.removeprefix("<|start|>assistant")


def harmony_calls(text: str) -> list[tuple[str, str]]:
    """Returns the recipient and the text of each call that OpenAI's parser finds in an answer of gpt-oss."""
    from openai_harmony import Role

    encoding = harmony()
    tokens = encoding.encode(text, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    return [(message.recipient, message.content[0].text) for message in messages if message.recipient]


def mistral_text(version: str, case: Case) -> str | None:
    """Returns the answer as Mistral's models write it, or None if this version of the tokenizer refuses the case."""
    from mistral_common.exceptions import MistralCommonException
    from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall

    calls = [
        ToolCall(id=f"abcDEF12{index}", function=FunctionCall(name=name, arguments=json.dumps(values)))
        for index, (name, values) in enumerate(case.calls)
    ]
    tools = [Tool(function=Function(name="now", parameters={}))]
    answer = AssistantMessage(content=case.content or None, tool_calls=calls)
    results = [ToolMessage(tool_call_id=call.id, name=call.function.name, content="sunny") for call in calls]
    request = ChatCompletionRequest(tools=tools, messages=[UserMessage(content="Hello?"), answer, *results])
    tokenizer = _mistral(version)
    try:
        text = str(tokenizer.encode_chat_completion(request).text)
    except MistralCommonException:
        return None
    return text.partition("[/INST]")[2].partition("</s>")[0].replace("▁", " ")


@cache
def _mistral(version: str) -> Any:
    """Returns Mistral's tokenizer of a version. The package has no file of versions 11 and 13.

    For these versions, uses the vocabulary of version 3 with the special tokens that the package defines.
    """
    from mistral_common.tokens.tokenizers.base import SpecialTokens
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    if version == "v3_tekken":
        return MistralTokenizer.v3(is_tekken=True)
    if version in ("v2", "v3", "v7"):
        return getattr(MistralTokenizer, version)()
    path = Path(MistralTokenizer._data_path()) / "tekken_240911.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["config"]["version"] = version
    data["special_tokens"] = [
        {"rank": rank, "token_str": token.value, "is_control": True} for rank, token in enumerate(SpecialTokens)
    ]
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "tekken.json"
        changed.write_text(json.dumps(data), encoding="utf-8")
        return MistralTokenizer.from_file(str(changed), mode="test")
