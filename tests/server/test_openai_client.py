"""Tests every function of the official OpenAI client that this server supports."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator

import pytest

from llm_serving.errors import QueueFullError
from support.fake_engine import LOGSUMEXP, MODEL_NAME, make_status
from support.lazy_module import LazyModule
from support.time_limits import time_limit

openai = LazyModule("openai")

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=time_limit(10)) as client:
        yield client


def test_models(client):
    models = client.models.list().data
    assert [(model.id, model.object, model.owned_by) for model in models] == [(MODEL_NAME, "model", "llm-serving")]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client, engine, tokenizer):
    engine.say("hello to the bird")
    completion = client.completions.create(model=MODEL_NAME, prompt="Once upon a time", max_tokens=32)
    [choice] = completion.choices
    assert completion.object == "text_completion"
    assert completion.model == MODEL_NAME
    assert completion.id.startswith("cmpl-")
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, " hello to the bird", "stop", None)
    prompt = tokenizer.encode("Once upon a time")
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 5
    assert completion.usage.total_tokens == len(prompt) + 5
    assert engine.submitted[0].prompt_token_ids == prompt
    assert engine.submitted[0].request_id == completion.id


def test_the_response_carries_its_request_id(client):
    raw = client.completions.with_raw_response.create(model=MODEL_NAME, prompt="a")
    assert raw.headers["x-request-id"] == raw.parse().id


def test_max_tokens_ends_with_length(client, engine):
    completion = client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=2)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 2
    assert client.completions.create(model=MODEL_NAME, prompt="a").usage.completion_tokens == 6
    assert [request.sampling.max_tokens for request in engine.submitted] == [2, 16]


def test_streamed_completion(client, engine, record_property):
    whole = client.completions.create(model=MODEL_NAME, prompt="Once").choices[0].text
    chunks = list(client.completions.create(model=MODEL_NAME, prompt="Once", stream=True))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    record_property("other_streams", f"{text != whole:d} of 1")
    assert text == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_in_a_stream(client):
    chunks = list(
        client.completions.create(model=MODEL_NAME, prompt="Once", stream=True, stream_options={"include_usage": True})
    )
    assert [len(chunk.choices) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 6, 10)


def test_prompts_as_tokens_and_in_lists(client, engine, tokenizer):
    ids = tokenizer.encode("Once upon")
    for prompt, expected in (
        (ids, [ids]),
        ([ids, ids[:2]], [ids, ids[:2]]),
        (["Once upon", "a"], [ids, tokenizer.encode("a")]),
    ):
        engine.submitted.clear()
        completion = client.completions.create(model=MODEL_NAME, prompt=prompt)
        assert [choice.index for choice in completion.choices] == list(range(len(expected)))
        assert [request.prompt_token_ids for request in engine.submitted] == expected
        assert completion.usage.prompt_tokens == sum(map(len, expected))


def test_several_answers_come_interleaved_with_their_index(client, engine, tokenizer):
    def script(prompt, sampling):
        name = "hello" if sampling.seed == 7 else "the fox"
        return [*tokenizer.encode(name, add_special_tokens=False), 2]

    engine.script = script
    engine.delay_s = 0.002
    completion = client.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, seed=7)
    assert [choice.text.strip() for choice in completion.choices] == ["hello", "the fox", "hello", "the fox"]
    seeds = [request.sampling.seed for request in engine.submitted]
    assert seeds[0] == seeds[2] == 7
    assert seeds[1] == seeds[3] != 7
    texts: dict[int, str] = {}
    order = []
    for chunk in client.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, seed=7, stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
        order.append(chunk.choices[0].index)
    assert [texts[i].strip() for i in range(4)] == ["hello", "the fox", "hello", "the fox"]
    assert order[:4] != [0, 0, 0, 0]
    assert len({request.request_id for request in engine.submitted}) == 8


def test_without_a_seed_every_prompt_gets_its_own(client, engine):
    client.completions.create(model=MODEL_NAME, prompt=["a", "a"], n=2)
    seeds = [request.sampling.seed for request in engine.submitted]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_echo_repeats_the_prompt(client, tokenizer):
    whole = client.completions.create(model=MODEL_NAME, prompt="Once", echo=True).choices[0].text
    assert whole == "Once  hello to the bird"
    chunks = client.completions.create(model=MODEL_NAME, prompt="Once", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    tokens = client.completions.create(model=MODEL_NAME, prompt=[1, 300], echo=True).choices[0].text
    assert tokens == f"{tokenizer.decode([300])}  hello to the bird"


def test_completion_logprobs(client, engine, tokenizer):
    engine.say("the fox")
    logprobs = client.completions.create(model=MODEL_NAME, prompt="Once", logprobs=2).choices[0].logprobs
    assert logprobs.tokens == [" the", " fox", "</s>"]
    assert logprobs.text_offset == [0, 4, 8]
    assert logprobs.token_logprobs == [2 - LOGSUMEXP] * 3
    first = tokenizer.encode("the", add_special_tokens=False)[0]
    follower = tokenizer.decode([1, 300, first + 1])[len(tokenizer.decode([1, 300])) :]
    assert logprobs.top_logprobs[0] == {" the": 2 - LOGSUMEXP, follower: 1 - LOGSUMEXP}
    assert engine.submitted[0].sampling.top_logits == 2
    only = client.completions.create(model=MODEL_NAME, prompt="Once", logprobs=0).choices[0].logprobs
    assert only.top_logprobs[0] == {" the": 2 - LOGSUMEXP}


def test_streamed_logprobs_are_those_of_the_whole(client, engine):
    engine.say("hello to the little fox")
    engine.tokens_per_piece = 2
    whole = client.completions.create(model=MODEL_NAME, prompt="Once", logprobs=1).choices[0].logprobs
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(model=MODEL_NAME, prompt="Once", logprobs=1, stream=True)
    ]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole, name)


def test_chat(client, engine, tokenizer):
    engine.say("hello to the bird")
    chat = client.chat.completions.create(model=MODEL_NAME, messages=HELLO)
    [choice] = chat.choices
    assert (chat.object, choice.finish_reason) == ("chat.completion", "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "hello to the bird")
    text = "<s><|user|>hello</s><|assistant|>"
    assert engine.submitted[0].prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert engine.submitted[0].sampling.max_tokens == 128 - len(engine.submitted[0].prompt_token_ids)
    assert chat.usage.completion_tokens == 5


def test_a_conversation_with_system_text_parts_and_an_earlier_answer(client, engine, tokenizer):
    answer = client.chat.completions.create(model=MODEL_NAME, messages=HELLO).choices[0].message
    client.chat.completions.create(
        model=MODEL_NAME,
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            answer.model_dump(),
            {"role": "user", "content": "bye"},
        ],
    )
    assert tokenizer.decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False) == (
        f"<s><|system|> Be kind.</s><|user|> ab</s><|assistant|> {answer.content}</s><|user|> bye</s><|assistant|>"
    )


def test_streamed_chat(client, engine):
    engine.say("hello to the bird")
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello to the bird"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_streams_of_random_tokens_equal_the_whole_texts(client, engine, record_property):
    other, rng = 0, random.Random(10)
    for length in range(40):
        tokens = [rng.randrange(3, engine.tokenizer.vocab_size) for _ in range(length)]
        engine.script = lambda prompt, sampling, tokens=tokens: [*tokens, 2]
        asked = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 64}
        whole = client.completions.create(**asked)
        stream = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        other += (text, stream[-1].usage) != (whole.choices[0].text, whole.usage)
    record_property("other_streams", f"{other} of 40")
    assert other == 0


def test_streamed_chat_with_several_answers(client, record_property):
    texts: dict[int, str] = {}
    roles = []
    for chunk in client.chat.completions.create(model=MODEL_NAME, messages=HELLO, n=3, stream=True):
        [choice] = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if choice.delta.role:
            roles.append(choice.index)
    record_property("other_streams", f"{sum(text != ' hello to the bird' for text in texts.values())} of 3")
    assert texts == dict.fromkeys(range(3), " hello to the bird")
    assert sorted(roles) == [0, 1, 2]


def test_chat_logprobs_with_bytes(client, engine, tokenizer):
    engine.script = lambda prompt, sampling: [*tokenizer.encode("你", add_special_tokens=False), 2]
    chat = client.chat.completions.create(model=MODEL_NAME, messages=HELLO, logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[32], [0xE4], [0xBD], [0xA0], list(b"</s>")]
    assert content[1].token == "bytes:\\xe4"
    assert [math.isclose(top.logprob, 2 - i - LOGSUMEXP) for i, top in enumerate(content[0].top_logprobs)] == [True] * 3
    streamed = []
    for chunk in client.chat.completions.create(
        model=MODEL_NAME, messages=HELLO, logprobs=True, top_logprobs=3, stream=True
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_text_never_splits_a_character(client, engine, tokenizer, record_property):
    engine.say("你好 🙂 fox")
    chunks = client.chat.completions.create(model=MODEL_NAME, messages=HELLO, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    split = sum("\ufffd" in piece for piece in pieces)
    record_property("split_characters", f"{split} of {len(pieces)}")
    assert "".join(pieces) == "你好 🙂 fox"
    assert split == 0
    for limit in range(1, 8):
        text = (
            client.chat.completions.create(model=MODEL_NAME, messages=HELLO, max_tokens=limit)
            .choices[0]
            .message.content
        )
        assert "你好 🙂 fox".startswith(text)


def test_stop_strings(client, engine):
    completion = client.completions.create(model=MODEL_NAME, prompt="a", stop=["e b", "zzz"])
    assert completion.choices[0].text.endswith("to th")
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].model_extra["stop_reason"] == "e b"
    chunks = client.completions.create(model=MODEL_NAME, prompt="a", stop="e b", stream=True)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == completion.choices[0].text
    kept = client.completions.create(
        model=MODEL_NAME, prompt="a", stop="e b", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text.endswith("to the b")


def test_sampling_parameters_reach_the_engine(client, engine):
    client.completions.create(
        model=MODEL_NAME,
        prompt="a",
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        seed=-1,
        extra_body={
            "top_k": 7,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "skip_special_tokens": False,
        },
    )
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.1, -0.2)
    assert (sampling.seed, sampling.ignore_eos, sampling.stop_token_ids) == (2**64 - 1, True, {5})
    assert not sampling.skip_special_tokens


def test_nulls_and_harmless_fields_are_accepted(client, engine):
    client.chat.completions.create(
        model=MODEL_NAME,
        messages=HELLO,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        extra_body={"temperature": None, "stop": None, "n": None, "tools": [], "response_format": {"type": "text"}},
    )
    assert engine.submitted[0].sampling.temperature == 1.0


def test_token_ids_on_request(client, engine, tokenizer):
    engine.say("hello fox")
    answer = [*tokenizer.encode("hello fox", add_special_tokens=False), 2]
    extra = {"return_token_ids": True}
    completion = client.completions.create(model=MODEL_NAME, prompt=[1, 300], extra_body=extra)
    assert completion.choices[0].model_extra["token_ids"] == answer
    assert completion.choices[0].model_extra["prompt_token_ids"] == [1, 300]
    for create, asked in (
        (client.completions.create, {"prompt": [1, 300]}),
        (client.chat.completions.create, {"messages": HELLO}),
    ):
        stream = create(model=MODEL_NAME, extra_body=extra, stream=True, **asked)
        extras = [chunk.choices[0].model_extra for chunk in stream]
        assert [token for more in extras for token in more.get("token_ids", [])] == answer
        prompts = [more["prompt_token_ids"] for more in extras if "prompt_token_ids" in more]
        assert prompts == [engine.submitted[-1].prompt_token_ids]


def test_errors_become_the_clients_exceptions(client, server, engine):
    with pytest.raises(openai.NotFoundError, match='serves "fake-llama"'):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model=MODEL_NAME, prompt="a", temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    engine.refuse = QueueFullError("the queue is full: 1024 requests wait")
    with pytest.raises(openai.RateLimitError, match="1024 requests wait") as full:
        client.completions.create(model=MODEL_NAME, prompt="a", stream=True)
    assert full.value.response.headers["retry-after"] == "1"
    engine.refuse = None
    engine.current = make_status(state="recovering")
    with pytest.raises(openai.InternalServerError, match="recovering") as down:
        client.completions.create(model=MODEL_NAME, prompt="a")
    assert down.value.status_code == 503


def test_an_error_in_a_stream_is_raised(client, engine):
    engine.fail_after = 2
    stream = client.completions.create(model=MODEL_NAME, prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="The engine could not complete the request"):
        list(stream)


def test_the_asynchronous_client(server):
    async def stream():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            chunks = await client.chat.completions.create(model=MODEL_NAME, messages=HELLO, stream=True)
            return [chunk async for chunk in chunks]

    chunks = asyncio.run(stream())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " hello to the bird"
