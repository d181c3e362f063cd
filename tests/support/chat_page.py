"""The chat page in a browser, with methods for a user's actions and for the checks of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.fake_engine import FakeEngine
from support.http_server import HttpServer, wait_until
from support.time_limits import time_limit
from tools.browser import Browser

IDLE = "document.getElementById('send').classList.contains('primary')"


class ChatPage:
    """One open chat page."""

    def __init__(self, browser: Browser, server: HttpServer, engine: FakeEngine) -> None:
        self.browser = browser
        self.server = server
        self.engine = engine
        self.expected: tuple[str, ...] = ()
        """Parts of messages in the console that the test expects."""

    def forget(self) -> None:
        """Removes everything that the browser has stored, and stops simulating another device."""
        for command in ("Emulation.clearDeviceMetricsOverride", "Network.enable"):
            self.browser.command(command)
        self.browser.command("Emulation.setEmulatedMedia", features=[])
        self.languages("en-US")
        self.browser.open("about:blank")
        self.browser.command("Storage.clearDataForOrigin", origin=self.server.url, storageTypes="all")
        self.browser.console()

    def languages(self, names: str) -> None:
        agent = self.browser.command("Browser.getVersion")["userAgent"]
        self.browser.command("Network.setUserAgentOverride", userAgent=agent, acceptLanguage=names)

    def phone(self) -> None:
        """Shows the page with the screen of a phone."""
        size = {"width": 375, "height": 700, "deviceScaleFactor": 2}
        self.browser.command("Emulation.setDeviceMetricsOverride", mobile=True, **size)

    def open(self, path: str = "/") -> None:
        self.browser.open(self.server.url + path)
        self.wait("document.body.dataset.ready")

    def run(self, script: str, *values: object) -> Any:
        return self.browser.run(script, *values)

    def wait(self, condition: str) -> Any:
        return self.browser.wait(condition, time_limit(20))

    def ask(self, text: str, *, says: str | None = None, wait: bool = True) -> None:
        """Types a question and sends it. ``says`` is the answer that the model will give."""
        if says is not None:
            self.engine.say(says)
        self.write(text)
        self.browser.press("Enter")
        if wait:
            self.wait_idle()

    def write(self, text: str) -> None:
        self.browser.click("#text")
        self.run("document.getElementById('text').value = ''")
        self.browser.type("#text", text)

    def wait_idle(self) -> None:
        self.wait(IDLE)

    def turns(self) -> list[list[str]]:
        """The role and the text of each message shown."""
        script = (
            "return [...document.querySelectorAll('.turn')].map((turn) => [turn.classList[1],"
            " turn.querySelector(':scope.user .bubble, :scope.assistant > .bubble > .body').innerText.trim()])"
        )
        return self.run(script)  # type: ignore[no-any-return]

    def shown(self, text: str) -> None:
        """Makes the page show a text as the answer of the model."""
        self.ask("show", says=text)

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def titles(self) -> list[str]:
        return self.run("return [...document.querySelectorAll('#list .pick')].map((each) => each.innerText)")  # type: ignore[no-any-return]

    def last_body(self) -> dict[str, Any]:
        """The body of the last chat request that the page has sent."""
        return json.loads(self.run("return JSON.stringify(window.sent?.at(-1) ?? null)"))  # type: ignore[no-any-return]

    def watch_requests(self) -> None:
        """Keeps the bodies of all requests that the page sends after this call."""
        self.run(
            "window.sent = []; const real = window.fetch; window.fetch = (path, options) => {"
            " if (options?.body) window.sent.push(JSON.parse(options.body)); return real(path, options); }"
        )

    def problems(self) -> list[str]:
        return [entry for entry in self.browser.console() if not any(part in entry for part in self.expected)]

    def click(self, selector: str) -> None:
        self.browser.click(selector)

    def choose_file(self, selector: str, file: Path) -> None:
        """Chooses a file as in the browser's dialog for files."""
        self.browser.type(selector, str(file))

    def downloaded(self, name: str) -> Path:
        """Waits for a file that the page has saved, and returns its path."""
        file = self.browser.downloads / name
        wait_until(file.is_file, 10)
        return file
