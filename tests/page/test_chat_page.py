"""Tests the chat page in a browser: a user's actions with conversations, messages, files and settings."""

from __future__ import annotations

import json

import pytest

from llm_serving.errors import QueueFullError
from support.chat_page import ChatPage
from support.http_server import wait_until

pytestmark = pytest.mark.page


def test_an_answer_is_streamed_and_measured(page: ChatPage) -> None:
    page.ask("What is the capital of France?", says="The capital is **Paris**.")
    assert page.turns() == [["user", "What is the capital of France?"], ["assistant", "The capital is Paris."]]
    assert page.text(".assistant strong") == "Paris"
    facts = page.text(".assistant .facts")
    assert "first token " in facts
    assert " tokens" in facts
    assert page.text("#title") == "What is the capital of France?"
    assert page.run("return document.getElementById('model').value") == "fake-llama"


def test_tokens_per_second_are_those_of_the_stream(page: ChatPage) -> None:
    page.engine.delay_s = 0.01
    page.ask("speed", says="one two three four five six seven eight nine ten " * 6)
    assert "tokens/s" in page.text(".assistant .facts")


def test_stop_ends_the_request_and_keeps_the_text(page: ChatPage) -> None:
    page.engine.delay_s = 0.05
    page.ask("Tell me a story.", says="Once upon a time " * 200, wait=False)
    page.wait("document.querySelector('.assistant .body')?.innerText.length > 20")
    assert page.text("#send") == "Stop"
    page.click("#send")
    page.wait_idle()
    assert "stopped" in page.text(".assistant .facts")
    assert page.turns()[1][1].startswith("Once upon a time")
    wait_until(lambda: page.engine.submitted[-1].aborted)


def test_escape_stops_too(page: ChatPage) -> None:
    page.engine.delay_s = 0.05
    page.ask("Tell me a story.", says="Once upon a time " * 200, wait=False)
    page.wait("document.querySelector('.assistant .body')?.innerText.length > 5")
    page.browser.press("Escape")
    page.wait_idle()
    assert "stopped" in page.text(".assistant .facts")


def test_retry_makes_a_second_answer_and_both_can_be_shown(page: ChatPage) -> None:
    page.ask("Who are you?", says="first answer")
    page.engine.say("second answer")
    page.click(".assistant .retry")
    page.wait("document.querySelector('.assistant .body').innerText.includes('second')")
    page.wait_idle()
    assert page.text(".assistant .tools").split("\n")[:3] == ["‹", "2/2", "›"]
    page.click(".assistant [aria-label='Previous version']")
    assert page.turns()[1] == ["assistant", "first answer"]
    assert page.run("return document.querySelector('[aria-label=\"Previous version\"]').disabled")


def test_an_edited_message_is_a_branch_with_its_own_answers(page: ChatPage) -> None:
    page.ask("What is red?", says="a colour")
    page.ask("And blue?", says="also a colour")
    page.engine.say("a fruit")
    page.click(".user .edit")
    page.run("document.querySelector('.editing textarea').value = ''")
    page.browser.type(".editing textarea", "What is an apple?")
    page.click(".editing .save")
    page.wait("document.querySelector('.assistant .body')?.innerText.includes('fruit')")
    page.wait_idle()
    assert page.turns() == [["user", "What is an apple?"], ["assistant", "a fruit"]]
    page.click(".user [aria-label='Previous version']")
    assert [text for _, text in page.turns()] == ["What is red?", "a colour", "And blue?", "also a colour"]
    page.click(".user [aria-label='Next version']")
    assert len(page.turns()) == 2


def test_the_model_gets_the_shown_branch_without_old_thinking(page: ChatPage) -> None:
    page.watch_requests()
    page.ask("one", says="<think>secret plan</think>first")
    page.ask("two", says="second")
    assert page.last_body()["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
    ]  # fmt: skip


def test_thinking_is_folded(page: ChatPage) -> None:
    page.ask("think", says="<think>\nI *wonder*.\n</think>\n\nThe answer is 4.")
    assert page.run("return document.querySelector('.thought').open") is False
    assert page.turns()[1] == ["assistant", "The answer is 4."]
    page.click(".thought summary")
    assert page.text(".thought .body") == "I wonder."


def test_thinking_in_a_field_of_its_own_is_folded(page: ChatPage) -> None:
    deltas = [{"reasoning_content": "I *wonder*."}, {"content": "It is 4."}]
    events = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas]
    page.run(
        "const real = window.fetch, text = arguments[0];"
        "window.fetch = (path, options) => path === '/v1/chat/completions'"
        " ? Promise.resolve(new Response(text)) : real(path, options)",
        "".join([*events, "data: [DONE]\n\n"]),
    )
    page.ask("think")
    assert page.turns()[1] == ["assistant", "It is 4."]
    page.click(".thought summary")
    assert page.text(".thought .body") == "I wonder."


def test_conversations_survive_a_reload(page: ChatPage) -> None:
    page.ask("first question", says="first answer")
    page.click("#new")
    page.ask("second question", says="second answer")
    page.open()
    assert page.titles() == ["second question", "first question"]
    assert page.turns()[0] == ["user", "second question"]
    page.click("#list li:nth-child(2) .pick")
    assert page.turns() == [["user", "first question"], ["assistant", "first answer"]]


def test_search_rename_and_delete(page: ChatPage) -> None:
    page.ask("about apples", says="apples grow on trees")
    page.click("#new")
    page.ask("about rivers", says="rivers flow")
    page.browser.press("Control", "k")
    page.browser.type("#search", "GROW on")
    assert page.titles() == ["about apples"]
    page.browser.type("#search", "zzz")
    assert page.titles() == []
    assert page.text("#nothing") == "No conversation has this text."
    page.run("const s = document.getElementById('search'); s.value = ''; s.dispatchEvent(new Event('input'))")
    page.click("#list li:nth-child(2) summary")
    page.click("#list li:nth-child(2) .menu .rename")
    page.browser.type("#ask-text", "Fruit")
    page.browser.press("Enter")
    page.wait("[...document.querySelectorAll('#list .pick')].some((each) => each.innerText === 'Fruit')")
    page.click("#list li:nth-child(1) summary")
    page.click("#list li:nth-child(1) .menu .delete")
    assert page.text("#ask-title") == "Delete “about rivers”? This cannot be undone."
    page.click("#ask-yes")
    page.wait("document.querySelectorAll('#list li').length === 1")
    page.open()
    assert page.titles() == ["Fruit"]


def test_export_and_import_keep_every_branch(page: ChatPage) -> None:
    page.ask("question", says="answer one")
    page.engine.say("answer two")
    page.click(".assistant .retry")
    page.wait("document.querySelector('.assistant .body').innerText.includes('two')")
    page.wait_idle()
    page.click("#export-all")
    file = page.downloaded("conversations.json")
    saved = json.loads(file.read_text("utf-8"))
    assert saved["format"] == "llm-serving conversations 1"
    assert [len(each["messages"]) for each in saved["conversations"]] == [3]
    page.forget()
    page.open()
    assert page.titles() == []
    page.choose_file("#import-file", file)
    page.wait("document.querySelectorAll('#list li').length === 1")
    assert page.turns() == [["user", "question"], ["assistant", "answer two"]]
    page.click(".assistant [aria-label='Previous version']")
    assert page.turns()[1] == ["assistant", "answer one"]


def test_export_as_markdown(page: ChatPage) -> None:
    page.ask("a question", says="an *answer*")
    page.click("#list summary")
    page.click("#list .menu .export_markdown")
    text = page.downloaded("a-question.md").read_text("utf-8")
    assert text == "# a question\n\n## You\n\na question\n\n## Answer\n\nan *answer*\n"


def exported(**message: str) -> str:
    """Returns the text of an exported conversation with one message."""
    conversation = {"title": "x", "messages": [{"id": "1", "parent": "", "role": "user", "text": "y", **message}]}
    return json.dumps({"format": "llm-serving conversations 1", "conversations": [conversation]})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "JSON"),
        ('{"format": "other"}', '"format" is not'),
        (exported(parent="9"), "message 1 has a wrong place"),
        (exported(role="system"), "neither user nor assistant"),
        (exported(id="x"), "is not a number"),
    ],
)
def test_a_wrong_import_is_refused_with_the_reason(page: ChatPage, tmp_path, content: str, reason: str) -> None:
    (tmp_path / "import.json").write_text(content)
    page.choose_file("#import-file", tmp_path / "import.json")
    page.wait("!document.getElementById('nothing').hidden")
    assert reason in page.text("#nothing")
    assert page.titles() == []


def test_settings_reach_the_model_and_stay(page: ChatPage) -> None:
    page.click("#settings-open")
    page.browser.type("#system", "Be brief.")
    page.browser.type("#temperature", "0.3")
    page.browser.type("#max_tokens", "7")
    page.click("#settings button[type=submit]")
    page.open()
    page.watch_requests()
    page.ask("hello", says="yes")
    body = page.last_body()
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.3, 7, "fake-llama")
    assert "top_p" not in body


def test_a_dropped_text_file_is_part_of_the_message(page: ChatPage) -> None:
    page.watch_requests()
    page.run(
        "const data = new DataTransfer();"
        "data.items.add(new File(['line one\\n```\\nline two'], 'notes.txt', {type: 'text/plain'}));"
        "data.items.add(new File([new Uint8Array([0xff, 0xfe, 0])], 'picture.png'));"
        "data.items.add(new File(['x'.repeat(256 * 1024 + 1)], 'big.txt'));"
        "dispatchEvent(new DragEvent('dragenter', {dataTransfer: data}));"
        "dispatchEvent(new DragEvent('drop', {dataTransfer: data, cancelable: true}));"
    )
    page.wait("document.querySelectorAll('#files li').length === 3")
    assert page.text("#files").split("\n")[0].startswith("notes.txt")
    assert "picture.png is not a text file in UTF-8." in page.text("#files")
    assert "big.txt is larger than 256 KB." in page.text("#files")
    page.ask("Summarise.", says="two lines")
    assert page.last_body()["messages"][-1]["content"] == "notes.txt\n````\nline one\n```\nline two\n````\n\nSummarise."
    assert page.text(".user .attached summary") == "notes.txt"
    assert page.count("#files li") == 0


def test_a_full_queue_is_shown_with_the_time_to_wait(page: ChatPage) -> None:
    page.expected = ("429",)
    page.engine.refuse = QueueFullError("The queue is full.", retry_after_s=4)
    page.ask("hello")
    error = page.text(".assistant .error")
    assert error.startswith("The server is busy. Try again in ")
    assert "The queue is full." in error
    page.engine.refuse = None
    page.engine.say("here I am")
    page.click(".assistant .retry")
    page.wait("document.querySelector('.assistant .body').innerText === 'here I am'")


def test_an_error_in_the_middle_keeps_the_text(page: ChatPage) -> None:
    page.engine.fail_after = 20
    page.ask("hello", says="one two three four five six seven eight nine ten " * 3)
    assert page.text(".assistant .error") != ""
    assert page.turns()[1][1].startswith("one two")


def test_a_model_without_chat_template_continues_the_text(page: ChatPage) -> None:
    page.expected = ("400",)
    page.watch_requests()
    page.run(
        "const real = window.fetch; window.fetch = (path, options) => path === '/v1/chat/completions'"
        ' ? Promise.resolve(new Response(\'{"error": {"message": "none", "code": "no_chat_template"}}\','
        " {status: 400})) : real(path, options)"
    )
    page.ask("Once upon", says="a time")
    assert page.turns()[1] == ["assistant", "a time"]
    assert page.last_body()["prompt"] == "Once upon"
