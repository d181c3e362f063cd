"""The accepted requests that take the server's event loop longest, one for each kind of work."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from llm_serving.constraints.grammar import MAX_CHOICES as MAX_GRAMMAR_CHOICES
from llm_serving.constraints.grammar import MAX_GRAMMAR_BYTES
from llm_serving.constraints.work_limits import MAX_PROPERTIES
from llm_serving.sampling_params import PARAMETERS
from llm_serving.server.limits import (
    INLINE_BODY_BYTES,
    INLINE_CHAT_CHARS,
    INLINE_ITEMS,
    INLINE_MESSAGES,
    INLINE_TOKENIZE_CHARS,
    MAX_CHOICES,
    MAX_DETOKENIZE,
    MAX_JSON_DEPTH,
    MAX_JSON_OBJECTS,
    MAX_JSON_VALUES,
    MAX_LOGPROB_ENTRIES,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_SEQUENCES,
    MAX_TOOLS,
)
from performance.models.folders import write_safetensors
from support.chat_images import data_url, image_part, png_of
from support.embedding_folders import write_embedding_folder
from support.small_configs import TINY_LLAMA, write_json
from support.time_limits import time_limit

CONTEXT = 2048
BODY_BYTES = 8 << 20
TIMEOUT_S = 600.0
OVERRIDES = ("model_config.decode_batch_size=[64]", "model_config.prefill_batch_size=[16]", "pa_config.num_blocks=4096")
IMAGE_OVERRIDES = ("model_config.seq_length=[1024]", "model_config.max_generate_length=1024",
                   "pa_config.decode_seq_length=1024", f"serving_config.max_body_bytes={16 << 20}")  # fmt: skip
EMBEDDING_OVERRIDES = ("model_config.decode_batch_size=[64]", "model_config.prefill_batch_size=[16]")
EMBEDDING_WIDTH = 4096
"""Numbers of an embedding, as many as those of Qwen3-Embedding-8B."""
FILE_BYTES = 64 << 20
"""Size of an uploaded file with the requests of a batch."""
SLOW_TEMPLATE = (
    "{% for i in range(9000) %}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
)
"""A chat template that uses nearly all steps that a template may take on the event loop."""


NUMBER = "#NUMBER#"
"""A part of a body that is another number each time. So the server has no compiled grammar from the time before."""
_SENT = itertools.count()


@dataclass(frozen=True)
class WorstRequest:
    """A request that the server accepts.

    ``read`` is the client's function that reads the response. It may read slowly on purpose.
    """

    name: str
    path: str
    body: bytes
    read: Callable[[http.client.HTTPResponse], None] = lambda response: _read_all(response)
    method: str = "POST"
    content_type: str = "application/json"

    def send(self, port: int) -> None:
        """Sends the request and reads the response. Raises AssertionError if it is not accepted."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=time_limit(TIMEOUT_S))
        try:
            body = self.body.replace(NUMBER.encode(), str(next(_SENT)).encode())
            connection.request(self.method, self.path, body, {"Content-Type": self.content_type})
            response = connection.getresponse()
            assert response.status == 200, (self.name, response.status, response.read()[:300])
            self.read(response)
        finally:
            connection.close()


def slow_model(folder: Path) -> Path:
    """Makes a copy of the tiny model whose chat template takes many steps."""
    model = folder / "slow_model"
    shutil.copytree(TINY_LLAMA, model)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": SLOW_TEMPLATE}))
    return model


def worst_requests(max_tokens: int) -> list[WorstRequest]:
    """Returns the requests. The server must run with ``OVERRIDES`` and a folder for batches. ``max_tokens`` limits the
    length of outputs.

    The requests of operators come last, because their responses describe the requests before.
    """
    return [*_bodies(), *_texts(), *_grammars(), *_outputs(max_tokens), _upload(), *_operators()]


def wide_embedding_model(folder: Path) -> Path:
    """Makes a small model whose embeddings have ``EMBEDDING_WIDTH`` numbers."""
    model = write_embedding_folder(folder / "embedding_model", "mean_tokens", dense=True)
    values = json.loads((model / "2_Dense" / "config.json").read_text())
    write_json(model / "2_Dense" / "config.json", {**values, "out_features": EMBEDDING_WIDTH})
    random = np.random.default_rng(0)
    weight = random.standard_normal((EMBEDDING_WIDTH, values["in_features"])).astype(np.float32)
    bias = random.standard_normal(EMBEDDING_WIDTH).astype(np.float32)
    write_safetensors(model / "2_Dense" / "model.safetensors", {"linear.weight": weight, "linear.bias": bias})
    return model


def worst_embedding_requests() -> list[WorstRequest]:
    """Returns requests with as many texts as possible, for a server of ``wide_embedding_model``."""
    length = 32768 // MAX_SEQUENCES - 8  # tokens of a text, because a request may need at most 32768 tokens
    texts = ["t9 " * length] * MAX_SEQUENCES
    some = texts[: MAX_SEQUENCES - 1]
    return [
        _request("embeddings: numbers", "/v1/embeddings", {"input": texts}),
        _request("embeddings: base64", "/v1/embeddings", {"input": texts, "encoding_format": "base64"}),
        _request("embeddings: tokens", "/v1/embeddings", {"input": [[7] * length] * MAX_SEQUENCES}),
        _request("embeddings: rerank", "/v1/rerank", {"query": "t9", "documents": some, "return_documents": True}),
        _request("embeddings: score", "/v1/score", {"text_1": "t9", "text_2": some}),
    ]


def worst_image_requests() -> list[WorstRequest]:
    """Returns requests with the largest images, for a server of ``performance.models.vision`` with ``IMAGE_OVERRIDES``.

    The files are as large, or have as many pixels, as the server accepts. All APIs receive one of them.
    """
    noise = Image.effect_noise((2600, 2600), 120)
    flat = Image.new("RGBA", (4096, 4096), (9, 180, 70, 100))
    webp = flat.resize((2048, 2048)).convert("RGB")
    files = {
        "a PNG of noise": data_url(png_of(noise)),
        "a transparent PNG": data_url(png_of(flat)),
        "a JPEG in CMYK": data_url(png_of(flat.convert("RGB").convert("CMYK"), "JPEG")),
        "a WebP": data_url(png_of(webp, "WEBP")),
    }
    chat: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    requests = [
        _request(f"image: {name}", "/v1/chat/completions", {**chat, "messages": _user(image_part(url))})
        for name, url in files.items()
    ]
    noisy = files["a PNG of noise"]
    source = {"type": "base64", "media_type": "image/png", "data": noisy.partition(",")[2]}
    many = [image_part(data_url(png_of(noise.resize((1000, 1000)))), detail="low")] * 5
    return [
        *requests,
        _request("image: messages", "/v1/messages", {**chat, "messages": _user({"type": "image", "source": source})}),
        _request("image: response that is stored", "/v1/responses",
                 {"max_output_tokens": 2, "input": _user({"type": "input_image", "image_url": noisy})}),
        _request("image: many", "/v1/chat/completions", {**chat, "messages": _user(*many)}),
        _request("image: tokenize", "/tokenize", {"messages": _user(image_part(noisy))}),
    ]  # fmt: skip


def _user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def _bodies() -> list[WorstRequest]:
    """Returns requests whose bodies are as large, or have as many parts, as the parser accepts.

    Most of a body is in its field ``metadata``, which the server accepts and ignores.
    """
    small = {"prompt": "a", "max_tokens": 1}
    number = len("31999,")
    values = min(MAX_JSON_VALUES, (BODY_BYTES - 1000) // number) - 1000
    half = BODY_BYTES - 1000
    return [
        _completion("body: one long text", small, metadata="x" * half),
        _completion("body: escaped ASCII", small, metadata="é" * (half // 6)),
        _completion("body: numbers", small, metadata=[31999] * values),
        _completion("body: objects", small, metadata=[{f"a{i}": i} for i in range(MAX_JSON_OBJECTS // 2)]),
        _completion("body: inline limit", small, metadata=["a"] * ((INLINE_BODY_BYTES - 200) // 4)),
    ]


def _texts() -> list[WorstRequest]:
    """Returns requests that need much work before the first step.

    The requests tokenize texts that are slow to encode, detokenize many tokens, have very many prompt tokens, or render
    chats with many messages.
    """
    requests = []
    for name, text in {"letters": "a" * 2900, "words": "word " * 580, "marks": "e\u0302\u0323" * 960}.items():
        requests += [
            _request(f"tokenize: {name}", "/tokenize", {"prompt": text}),
            _request(
                f"tokenize {name} at the inline limit", "/tokenize", {"prompt": (text * 9)[:INLINE_TOKENIZE_CHARS]}
            ),
        ]
    long = [[7] * (CONTEXT - 2)] * (MAX_CHOICES - 1)
    message = {"role": "user", "content": "a"}
    call = {"id": "", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call] * MAX_TOOLS}
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}] * (MAX_MESSAGES // 4)
    parts = [{"type": "output_text", "text": ""}] * (MAX_JSON_OBJECTS // 5)
    inline = [{"role": "user", "content": "a" * (INLINE_CHAT_CHARS // INLINE_MESSAGES // 40)}] * INLINE_MESSAGES
    return [
        *requests,
        _request("detokenize", "/detokenize", {"tokens": [300] * MAX_DETOKENIZE}),
        _request("detokenize at the inline limit", "/detokenize", {"tokens": [300] * INLINE_ITEMS}),
        _completion("prompts: as many tokens as possible", {"prompt": long, "max_tokens": 1}),
        _completion("prompts: as many as possible", {"prompt": ["a"] * MAX_SEQUENCES, "max_tokens": 1}),
        _completion("prompts: repeated in the response", {"prompt": long, "max_tokens": 1, "echo": True}),
        _tensors("prompts: tensors of token ids", [token for prompt in long for token in prompt], "INT32"),
        _tensors("prompts: nested tensors of token ids", long, "INT64"),
        _request(
            "template: messages", "/tokenize", {"messages": [{**message, "content": ""}] * (MAX_MESSAGES * 3 // 4)}
        ),
        _request("template: tool calls", "/tokenize", {"messages": [calls] * 3}),
        _request("convert: messages", "/v1/messages/count_tokens", {"messages": [*turns, message]}),
        _request("convert: parts of a response", "/v1/responses",
                 {"max_output_tokens": 16, "input": [message, {"role": "assistant", "content": parts}, message]}),
        _request("template: inline limit", "/tokenize", {"messages": inline}),
    ]  # fmt: skip


def _grammars() -> list[WorstRequest]:
    """Returns requests with the largest grammars that the server accepts. Each of them takes one output token."""
    names = [f"{i:x}" for i in range(MAX_PROPERTIES)]
    chain = {f"{i:x}": {"items": {"$ref": f"#/$defs/{i + 1:x}"}} for i in range(1500)}
    nested: dict[str, Any] = {}
    for _ in range(MAX_JSON_DEPTH // 2 - 3):
        nested = {"properties": {"a": nested}}
    schemas: dict[str, Any] = {
        "properties": {"type": "object", "properties": {name: {} for name in names}},
        "typed properties": {"properties": {f"a{i}": {"type": "integer"} for i in range(MAX_GRAMMAR_BYTES // 40)}},
        "required properties": {"type": "object", "required": names},
        "enum": {"enum": [f"{i:x}" for i in range(MAX_GRAMMAR_BYTES // 9)]},
        "nested": {"type": "object", **nested},
        "references": {"$defs": {**chain, f"{1500:x}": {}}, "$ref": "#/$defs/0"},
        "patterns": {"type": "object", "properties": {name: {"pattern": f"(a|b)*a.{{9}}{name}", "minLength": 9}
                                                      for name in names[:900]}},
        "numbers": {"type": "object", "properties": {name: {"type": "number", "minimum": 0.123456, "maximum": 98765.432}
                                                     for name in names[:700]}},
    }  # fmt: skip
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(4000))
    texts: dict[str, Any] = {
        "regex": {"regex": f"{NUMBER}|" + "|".join(f"{i:x}[a-z]{{1,9}}" for i in range(4000))},
        "choice": {"choice": [NUMBER, *(f"{i:040d}" for i in range(MAX_GRAMMAR_CHOICES - 1))]},
        "lark": {"grammar": f'start: r0 // {NUMBER}\n{rules}r4000: "x"\n'},
    }
    small: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    properties: dict[str, Any] = {name: {} for name in names[:150]}
    function = {"name": "a", "parameters": {"type": "object", "title": NUMBER, "properties": properties}}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": function}]}
    bodies = {**{name: {"json": {"title": NUMBER, **one}} for name, one in schemas.items()}, **texts}
    requests = [_completion(f"grammar: {name}", small, structured_outputs=one) for name, one in bodies.items()]
    return [*requests, _request("grammar: tool", "/v1/chat/completions", {**chat, "max_tokens": 1})]


def _outputs(max_tokens: int) -> list[WorstRequest]:
    """Returns requests whose outputs have as many choices, log-probabilities and stop strings as possible."""
    length = min(MAX_LOGPROB_ENTRIES // (MAX_LOGPROBS + 1) // MAX_CHOICES, max_tokens)
    tokens = {"prompt": "a", "n": MAX_CHOICES, "max_tokens": length, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    logprobs = {**tokens, "logprobs": MAX_LOGPROBS}
    stop = PARAMETERS["stop"]
    near = ["e" * ((stop.max_chars or 0) - 1) + chr(ord("a") + i) for i in range(stop.max_items or 0)]
    chat = {**tokens, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": MAX_LOGPROBS}
    del chat["prompt"]
    details = {"max_new_tokens": min(1500, max_tokens), "details": True, "top_n_tokens": 5, "return_logits": True}
    return [
        _completion("output: choices and log-probabilities", logprobs),
        _completion("output: stream of log-probabilities", logprobs, stream=True),
        _completion("output: stream to a slow reader", logprobs, read=_read_late, stream=True),
        _completion("output: stop strings", tokens, stop=near),
        _completion("output: stream of token ids", tokens, stream=True, return_token_ids=True),
        _request("output: chat with log-probabilities", "/v1/chat/completions", chat),
        _request("output: stream of details", "/generate_stream", {"inputs": "a", "parameters": details}),
        _completion("output: beams", {"prompt": "a", "max_tokens": 64, "use_beam_search": True, "n": 16}),
    ]


def _upload() -> WorstRequest:
    """Returns the upload of a file with the requests of a batch."""
    body = {"model": "llama_tiny", "messages": [{"role": "user", "content": "a" * 1200}], "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    content = json.dumps(line).encode() + b"\n"
    boundary = "boundary-of-parts"
    heads = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n',
    ]
    form = "".join(heads).encode() + content * (FILE_BYTES // len(content)) + f"\r\n--{boundary}--\r\n".encode()
    content_type = f"multipart/form-data; boundary={boundary}"
    return WorstRequest("batch: upload of a file", "/v1/files", form, content_type=content_type)


def _operators() -> list[WorstRequest]:
    paths = {"metrics": "/metrics", "receipts of requests": "/requests?limit=500"}
    return [WorstRequest(f"operators: {name}", path, b"", method="GET") for name, path in paths.items()]


def _tensors(name: str, ids: list[Any], datatype: str) -> WorstRequest:
    """Returns a request of KServe's protocol with as many token ids as ``MAX_CHOICES`` - 1 long prompts have."""
    prompts = {
        "name": "input_ids",
        "shape": [MAX_CHOICES - 1, CONTEXT - 2],
        "datatype": datatype,
        "data": ids,
    }
    limit = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [1]}
    return _request(name, "/v2/models/llama_tiny/infer", {"inputs": [prompts, limit]})


def _completion(
    name: str, fields: dict[str, Any], read: Callable[[http.client.HTTPResponse], None] | None = None, **more: Any
) -> WorstRequest:
    return _request(name, "/v1/completions", {**fields, **more}, read)


def _request(
    name: str, path: str, fields: dict[str, Any], read: Callable[[http.client.HTTPResponse], None] | None = None
) -> WorstRequest:
    body = json.dumps(fields, separators=(",", ":")).encode()
    return WorstRequest(name, path, body) if read is None else WorstRequest(name, path, body, read)


def _read_all(response: http.client.HTTPResponse) -> None:
    while response.read(1 << 20):
        pass


def _read_late(response: http.client.HTTPResponse) -> None:
    """Reads the response after a pause of 5 s, in which the server must keep the pieces of the stream."""
    time.sleep(5.0)
    _read_all(response)
