"""Tests the use of the pages with a keyboard, a screen reader, a phone, dark colours and in Chinese.

The library axe-core checks their accessibility.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.access_keys import access_for, secret_of
from support.axe import findings
from support.chat_page import ChatPage
from support.fake_engine import make_status
from support.http_server import HttpServer, running

pytestmark = pytest.mark.page

RICH = "# T\n\n<think>hm</think>\n\n`a` $x$\n\n| a |\n|---|\n| 1 |\n\n```python\n# note\nx = 'a' + f(1)\n```\n\n[link](https://x.invalid)"


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_axe_has_no_serious_findings(page: ChatPage, colours: str, device: str) -> None:
    page.browser.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
    if device == "phone":
        page.phone()
    page.ask("question", says="<think>hm</think>" + RICH)
    page.click(".thought summary")
    assert findings(page) == []
    page.click("#settings-open")
    assert findings(page) == []


def test_the_keyboard_is_enough(page: ChatPage) -> None:
    assert page.run("return document.activeElement.id") == "text"
    page.engine.say("first")
    page.browser.type("#text", "one")
    page.browser.press("Shift", "Enter")
    page.browser.type("#text", "two")
    page.browser.press("Enter")
    page.wait("document.querySelectorAll('.assistant').length === 1")
    page.wait_idle()
    assert page.turns()[0] == ["user", "one\ntwo"]
    assert page.run("return document.activeElement.id") == "text"
    page.engine.say("second")
    page.browser.press("Up")
    page.wait("document.activeElement.closest('.editing')")
    page.browser.press("!")
    page.browser.press("Enter")
    page.wait("document.querySelector('.assistant .body')?.innerText === 'second'")
    page.browser.press("Control", "k")
    reached = []
    for _ in range(12):
        reached.append(page.run("const e = document.activeElement; return e.id || e.className || e.tagName"))
        page.browser.press("Tab")
    assert reached[:3] == ["search", "pick", "SUMMARY"]
    assert {"import", "export-all", "model", "settings-open", "log"} <= set(reached)


def test_every_control_has_a_name(page: ChatPage) -> None:
    page.ask("question", says=RICH)
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, select, textarea, summary')].filter((each) =>"
        " each.checkVisibility() && !(each.getAttribute('aria-label') || each.textContent.trim() ||"
        " each.labels?.length || each.getAttribute('aria-labelledby'))).map((each) => each.outerHTML)"
    )
    assert nameless == []


def test_a_screen_reader_hears_the_whole_answer_once(page: ChatPage) -> None:
    page.run(
        "window.heard = []; new MutationObserver(() => heard.push(document.getElementById('said').textContent))"
        ".observe(document.getElementById('said'), {childList: true})"
    )
    page.engine.tokens_per_piece = 1
    page.ask("hello", says="<think>no</think>one two three")
    assert page.run("return heard") == ["The answer begins.", "Answer: one two three"]
    assert page.run("return document.getElementById('said').getAttribute('aria-live')") == "polite"


def test_a_phone_has_no_sideways_scrolling_and_a_drawer(page: ChatPage) -> None:
    page.phone()
    page.ask("question", says=RICH + "\n\n" + "long" * 100 + "\n\n```\n" + "x" * 300 + "\n```")
    assert page.run("return document.documentElement.scrollWidth") <= 375
    assert page.run("return getComputedStyle(document.getElementById('side')).visibility") == "hidden"
    page.click("#open-side")
    assert page.run("return document.getElementById('open-side').getAttribute('aria-expanded')") == "true"
    page.click("#list .pick")
    assert page.run("return getComputedStyle(document.getElementById('side')).visibility") == "hidden"


def test_chinese_follows_the_browser(page: ChatPage) -> None:
    page.languages("zh-CN,zh,en")
    page.open()
    assert page.run("return document.documentElement.lang") == "zh"
    assert page.text("#send") == "发送"
    page.ask("你好，世界", says="你好！**很高兴**见到你。")
    assert page.turns() == [["user", "你好，世界"], ["assistant", "你好！很高兴见到你。"]]
    assert "首个 token" in page.text(".assistant .facts")


def test_the_language_can_be_switched_and_stays(page: ChatPage) -> None:
    page.ask("hello", says="hi")
    page.click("#settings-open")
    page.run("const e = document.getElementById('language'); e.value = 'zh'; e.dispatchEvent(new Event('change'))")
    page.click("#settings button[type=submit]")
    assert page.text(".assistant .retry") == "重试"
    page.open()
    assert page.text("#new") == "新对话"


def test_the_colours_can_be_chosen(page: ChatPage) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = page.run(colour)
    page.run("const e = document.getElementById('theme'); e.value = 'dark'; e.dispatchEvent(new Event('change'))")
    assert page.run(colour) == "rgb(22, 24, 26)" != before


@pytest.fixture
def guarded(page: ChatPage, tmp_path: Path) -> Iterator[HttpServer]:
    with running(page.engine, access_for(tmp_path, "alice"), max_prompt_tokens=8192) as server:
        yield server


def test_a_server_with_keys_asks_for_the_key_and_the_tab_keeps_it(page: ChatPage, guarded: HttpServer) -> None:
    page.expected = ("401",)
    page.server = guarded
    page.open()
    page.wait("document.getElementById('settings').open")
    assert page.run("return document.activeElement.id") == "key"
    page.browser.type("#key", secret_of("alice"))
    page.browser.press("Enter")
    page.wait("document.getElementById('state').className === 'ready'")
    page.ask("hello", says="welcome")
    assert page.turns()[1] == ["assistant", "welcome"]
    kept = page.run("return [JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert [secret_of("alice") in each for each in kept] == [False, True]
    page.open()
    assert page.run("return document.getElementById('settings').open") is False


def test_a_server_that_loads_its_model_is_watched(page: ChatPage) -> None:
    page.expected = ("503",)
    page.engine.current = make_status(state="starting")
    page.open()
    page.wait("document.getElementById('state').className === 'loading'")
    assert page.run("return document.getElementById('state').title") == "The server is loading its model."
    page.engine.current = make_status()
    page.wait("document.getElementById('state').className === 'ready'")


def test_a_server_that_has_gone_is_reported(page: ChatPage) -> None:
    page.expected = ("ERR_CONNECTION_REFUSED",)
    page.server = HttpServer(page.engine).start()
    try:
        page.open()
    finally:
        page.server.stop()
    page.ask("anybody?")
    assert page.text(".assistant .error") == "The server cannot be reached. Is it running?"
    page.wait("document.getElementById('state').className === 'down'")
