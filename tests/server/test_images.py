"""Tests chats with images over HTTP: which images are refused, with which field and limit, and what the engine
receives.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llm_serving.config.image_section import DECODING_THREADS, ImageConfig
from llm_serving.images.pool import TilePool
from llm_serving.ipc.tiles import digest_of
from llm_serving.model.shape import ModelShape
from llm_serving.model.vision import read_processing
from performance.models.vision import IMAGE_TOKEN, write_vision_model
from support.chat_images import data_url, image_part, png_of, sample_part, sample_png
from support.fake_engine import MODEL_NAME, FakeEngine
from support.http_server import HttpServer, running, wait_until
from support.lazy_module import LazyModule
from support.small_tokenizers import open_tokenizer
from support.time_limits import time_limit

anthropic, openai = LazyModule("anthropic"), LazyModule("openai")

LIMITS = ImageConfig(max_images=2, max_bytes=40_000, max_pixels=70 * 100, max_tiles=12, allowed_hosts=("127.0.0.1",))
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "t1"}


class Places:
    def __init__(self, count: int) -> None:
        self.pixels = np.zeros((count, 48 * 48, 3), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "model"
    write_vision_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    engine, vision = FakeEngine(open_tokenizer(folder / "tokenizer.json")), ModelShape.from_hf_folder(folder).vision
    assert vision is not None
    engine.script = lambda prompt, sampling: [30, 31]
    engine.tiles = TilePool(Places(LIMITS.max_tiles))
    processing = read_processing(folder, vision, LIMITS.max_tile_pixels)
    settings: dict[str, Any] = {"vision": vision, "processing": processing, "tile_cost": 100}
    more = {"images": LIMITS, "max_prompt_tokens": 120, "max_request_tokens": 1400, "max_body_bytes": 200_000}
    with running(engine, **settings, **more) as server:
        yield server


def chat(*parts: dict[str, Any], role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 2, **fields}


BLANK = data_url(png_of(Image.new("RGB", (48, 48))))
PARAM = "messages[0].content[1].image_url"


@pytest.mark.parametrize(
    ("body", "param", "phrase"),
    [
        (chat(TEXT, {"type": "image_url"}), f"{PARAM}.url", "is missing"),
        (chat(TEXT, {"type": "image_url", "image_url": {"uri": BLANK}}), f"{PARAM}.url", "is missing"),
        (chat(TEXT, image_part(BLANK, detail="huge")), f"{PARAM}.detail", 'is "huge"; it must be auto, low, high'),
        (chat(TEXT, image_part(BLANK, size="1")), PARAM, 'the unknown field "size"'),
        (chat(TEXT, image_part(BLANK), role="system"), PARAM, "only messages of the user and results of tools have"),
        (chat(TEXT, *[image_part(BLANK)] * 3), "messages[0].content[3].image_url", "image 3; the maximum is 2 images"),
        (chat(TEXT, image_part("https://example.org/a.png")), f"{PARAM}.url", "image_config.allowed_hosts"),
        (chat(TEXT, image_part("file:///etc/passwd")), f"{PARAM}.url", "image_config.allowed_folders"),
        (chat(TEXT, image_part(data_url(bytes(40_001)))), f"{PARAM}.url", "the maximum is 40000"),
        (chat(TEXT, image_part(data_url(b"%PDF-1.4"))), f"{PARAM}.url", "not an image of a kind"),
        (
            chat(TEXT, image_part(data_url(png_of(Image.new("RGB", (71, 100)))))),
            f"{PARAM}.url",
            "71 x 100 = 7100 pixels; the maximum is 7000",
        ),
        (
            chat(TEXT, sample_part(0), sample_part(0)),
            "messages[0].content[2].image_url.url",
            "20 tiles with 180 tokens; the maximum of a prompt is 120",
        ),
        (chat({"type": "text", "text": "<image>"}, sample_part(1)), "messages", "must not contain <image>"),
        (chat(TEXT, sample_part(1), use_beam_search=True, n=2), "use_beam_search", "not supported for messages with"),
        (chat(TEXT, sample_part(1), prompt_logprobs=1), "prompt_logprobs", "not supported for messages with images"),
        (chat(TEXT, sample_part(1), n=4), "n", "the maximum for one request is 1400"),
    ],
)
def test_an_image_that_is_not_served_is_refused_with_field_and_limit(
    server: HttpServer, body: dict[str, Any], param: str, phrase: str
) -> None:
    before = len(server.engine.submitted)
    answer = server.post(CHAT, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert phrase in error["message"]
    assert len(server.engine.submitted) == before
    assert server.engine.tiles is not None
    wait_until(lambda: server.engine.tiles.num_free == LIMITS.max_tiles)


def test_slow_hosts_do_not_hold_the_images_of_other_requests(server: HttpServer) -> None:
    """Each decoding thread has one request for an image whose host never answers. Other requests still get their
    images.
    """
    with socket.create_server(("127.0.0.1", 0)) as host, ThreadPoolExecutor(DECODING_THREADS) as clients:
        slow = chat(TEXT, image_part(f"http://127.0.0.1:{host.getsockname()[1]}/a.png"))
        answers = [clients.submit(server.post, CHAT, slow) for _ in range(DECODING_THREADS)]
        connections = [host.accept()[0] for _ in answers]
        assert server.post(CHAT, chat(TEXT, image_part(BLANK, detail="low"))).status_code == 200
        assert not any(each.done() for each in answers)
        del server.engine.submitted[-1].images  # frees the places of its tiles
        for each in connections:
            each.close()
        assert [each.result().status_code for each in answers] == [400] * DECODING_THREADS


def test_the_engine_receives_tiles_at_the_positions_of_their_tokens(server: HttpServer) -> None:
    body = chat(TEXT, sample_part(1), image_part(BLANK, detail="low"), TEXT)
    answer = server.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"].strip() == "t12 t13"
    submitted = server.engine.submitted[-1]
    ids, images = submitted.prompt_token_ids, submitted.images
    assert images is not None
    assert len(images.tiles) == 5
    for tile in images.tiles:
        assert ids[tile.begin : tile.begin + tile.rows] == [IMAGE_TOKEN] * 9
        assert ids[tile.begin - 1] != IMAGE_TOKEN
    assert images.tiles[-1].digest == digest_of(np.zeros((48, 48, 3), np.uint8))
    same = server.post("/tokenize", {"messages": body["messages"]}).json()
    assert same["tokens"] == ids
    del images, submitted.images
    wait_until(lambda: server.engine.tiles.num_free == LIMITS.max_tiles)


def test_too_few_free_places_are_a_reason_to_try_later(server: HttpServer) -> None:
    taken = server.engine.tiles.put([np.full((48, 48, 3), value, np.uint8) for value in range(10)])
    answer = server.post(CHAT, chat(TEXT, sample_part(1)))
    assert answer.status_code == 503
    assert "4 tiles of images do not fit the 2 free places of 12" in answer.json()["error"]["message"]
    taken.end()
    assert server.post(CHAT, chat(TEXT, sample_part(1))).status_code == 200


def test_a_conversation_without_images_has_parts_of_text(server: HttpServer) -> None:
    body = {"messages": [{"role": "user", "content": "t4"}], "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 200
    assert server.engine.submitted[-1].images is None


SMALL = data_url(sample_png(1))
CALL_ID = "call_1"


def base64_block(url: str = SMALL, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": url.partition(",")[2]}}


def in_messages(*blocks: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 2, "messages": [{"role": role, "content": list(blocks)}], **fields}


def in_responses(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}], "max_output_tokens": 2, **fields}


def input_image(url: str = SMALL, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def last_prompt(server: HttpServer) -> tuple[list[int], list[tuple[int, bytes]]]:
    """Returns the newest prompt with the positions and digests of its tiles, and frees the places of the tiles."""
    submitted = server.engine.submitted[-1]
    assert submitted.images is not None
    found = list(submitted.prompt_token_ids), [(tile.begin, tile.digest) for tile in submitted.images.tiles]
    del submitted.images
    return found


def test_all_apis_make_the_same_prompt(server: HttpServer) -> None:
    assert server.post(CHAT, chat(TEXT, sample_part(1))).status_code == 200
    expected = last_prompt(server)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=time_limit(10)) as client:
        body = in_messages(TEXT, base64_block())
        message = client.messages.create(model=MODEL_NAME, **body)
        assert last_prompt(server) == expected
        counted = client.messages.count_tokens(model=MODEL_NAME, messages=body["messages"])
        assert counted.input_tokens == message.usage.input_tokens == len(expected[0])
        url = {"type": "image", "source": {"type": "url", "url": SMALL}, "cache_control": {"type": "ephemeral"}}
        with client.messages.stream(model=MODEL_NAME, **in_messages(TEXT, url)) as stream:
            assert stream.get_final_message().content[0].text == message.content[0].text
        assert last_prompt(server) == expected
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=time_limit(10)) as client:
        text = {"type": "input_text", "text": "t1"}
        response = client.responses.create(model=MODEL_NAME, **in_responses(text, input_image()))
        assert last_prompt(server) == expected
        assert response.usage.input_tokens == len(expected[0])
        assert client.responses.create(
            model=MODEL_NAME, input="t5", previous_response_id=response.id, max_output_tokens=2
        ).usage.input_tokens > len(expected[0])
        ids, tiles = last_prompt(server)
        assert (ids[: tiles[-1][0]], tiles) == (expected[0][: tiles[-1][0]], expected[1]), (
            "the stored image comes again"
        )


def test_neighbouring_messages_with_images_become_one(server: HttpServer) -> None:
    server.post(CHAT, chat({"type": "text", "text": "t1\nt2"}, sample_part(1), TEXT))
    expected = last_prompt(server)
    two = [{"role": "user", "content": [TEXT, {"type": "text", "text": "t2"}]},
           {"role": "user", "content": [base64_block(), TEXT]}]  # fmt: skip
    assert server.post("/v1/messages", {"max_tokens": 2, "messages": two}).status_code == 200
    assert last_prompt(server) == expected


def test_results_of_tools_have_images(server: HttpServer) -> None:
    """This chat template has no tools, so the server renders two tool results as one user message."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "see", "arguments": "{}"}}
    ask = {"role": "user", "content": "t1"}
    results = [{"role": "tool", "tool_call_id": CALL_ID, "content": content} for content in ("t2", [sample_part(1)])]
    body = {"messages": [ask, {"role": "assistant", "tool_calls": [call]}, *results], "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 200
    expected = last_prompt(server)
    text = "".join(server.engine.tokenizer.decode(expected[0], skip_special_tokens=False).split())
    assert text.count("User:") == 2
    assert len(expected[1]) == 4

    use = {"type": "tool_use", "id": CALL_ID, "name": "see", "input": {}}
    blocks = [
        {"type": "tool_result", "tool_use_id": CALL_ID, "content": content} for content in ("t2", [base64_block()])
    ]
    messages = [ask, {"role": "assistant", "content": [use]}, {"role": "user", "content": blocks}]
    assert server.post("/v1/messages", {"messages": messages, "max_tokens": 2}).status_code == 200
    assert last_prompt(server) == expected

    items = [ask, {"type": "function_call", "call_id": CALL_ID, "name": "see", "arguments": "{}"}]
    items += [
        {"type": "function_call_output", "call_id": CALL_ID, "output": output} for output in ("t2", [input_image()])
    ]
    assert server.post("/v1/responses", {"input": items, "max_output_tokens": 2}).status_code == 200
    assert last_prompt(server) == expected


PDF = data_url(b"%PDF-1.4")
HOST = "https://example.org/a.png"
RESULT = {"type": "tool_result", "tool_use_id": CALL_ID}


@pytest.mark.parametrize(
    ("path", "body", "param", "phrase"),
    [
        ("messages", in_messages(TEXT, base64_block(PDF)), "messages[0].content[1].source.data",
         "not an image of a kind"),
        ("messages", in_messages(TEXT, base64_block("data:,!")), "messages[0].content[1].source.data", "base64"),
        ("messages", in_messages(TEXT, {"type": "image", "source": {"type": "url", "url": HOST}}),
         "messages[0].content[1].source.url", "image_config.allowed_hosts"),
        ("messages", in_messages(TEXT, {**RESULT, "content": [TEXT, base64_block(PDF)]}),
         "messages[0].content[1].content[1].source.data", "not an image of a kind"),
        ("messages", in_messages(*[base64_block(BLANK)] * 3), "messages[0].content[2]", "the maximum is 2 images"),
        ("messages", in_messages(base64_block(kind="image/gif")), "messages[0].content[0].source.media_type", "webp"),
        ("messages", in_messages({"type": "image", "source": {"type": "file", "file_id": "a"}}),
         "messages[0].content[0].source", "'base64', 'url'"),
        ("messages", in_messages({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
         "messages[0].content[0].source.data", "required"),
        ("messages", in_messages({**RESULT, "content": [{"type": "image", "source": {"type": "url"}}]}),
         "messages[0].content[0].content[0].source.url", "required"),
        ("messages", in_messages({**RESULT, "content": [{"type": "document"}]}),
         "messages[0].content[0].content", "document"),
        ("messages", in_messages(base64_block(), role="assistant"), "messages[0].content[0]", "image"),
        ("messages/count_tokens", {"messages": in_messages(base64_block(PDF))["messages"]},
         "messages[0].content[0].source.data", "not an image of a kind"),
        ("responses", in_responses(input_image(PDF), instructions="t1"), "input[0].content[0].image_url",
         "not an image"),
        ("responses", in_responses(input_image(HOST)), "input[0].content[0].image_url", "image_config.allowed_hosts"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": [input_image(PDF)]}]},
         "input[0].output[0].image_url", "not an image of a kind"),
        ("responses", in_responses(*[input_image(BLANK)] * 3), "input[0].content[2]", "the maximum is 2 images"),
        ("responses", in_responses(input_image(detail="huge")), "input[0].content[0].detail", "'auto', 'low'"),
        ("responses", in_responses({"type": "input_image", "file_id": "a"}), "input[0].content[0].file_id",
         "not supported"),
        ("responses", in_responses({"type": "input_file"}), "input[0].content", "input_file"),
        ("responses", in_responses(input_image(), role="assistant"), "input[0].content[0]", "only text"),
        ("responses", in_responses(input_image(), role="system"), "input[0].content[0]", "only messages of the user"),
    ],
)  # fmt: skip
def test_an_image_of_another_api_is_refused_with_its_field(
    server: HttpServer, path: str, body: dict[str, Any], param: str, phrase: str
) -> None:
    answer = server.post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert phrase in error["message"]
    assert "messages" not in error["message"] or path != "responses" or "only messages" in phrase
