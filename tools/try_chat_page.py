#!/usr/bin/env python3
"""Uses the chat page of a running server in headless Chromium, as a user would, and takes screenshots.

It asks a question, waits for the streamed response, starts a long one and stops it. It needs Debian's packages
``chromium`` and ``chromium-driver``. The exit code is 1 if the page does not work as expected.

    python tools/try_chat_page.py --out output
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.config.sections import DEFAULT_SERVER_PORT

CHROMIUM_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


class Browser:
    """A headless Chromium, controlled over the W3C WebDriver protocol."""

    def __init__(self, profile: str, size: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._base = f"http://127.0.0.1:{port}"
        flags = [*CHROMIUM_FLAGS, f"--user-data-dir={profile}", f"--window-size={size}"]
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": {"args": flags}}}
        self._wait_for_driver()
        self._base += "/session/" + self._call("POST", "/session", {"capabilities": capabilities})["sessionId"]

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        """Waits until a JavaScript expression is true. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page never reached: {condition}")
            time.sleep(0.05)

    def send(self, text: str) -> None:
        """Types into the message field and presses the button."""
        fill = f"field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input', {{bubbles: true}}));"
        self.run(f"const field = document.getElementById('text'); {fill} document.getElementById('send').click();")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()

    def _wait_for_driver(self) -> None:
        for _ in range(100):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("chromedriver did not start")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]


def try_page(browser: Browser, url: str, out: Path) -> list[str]:
    """Sends messages on the chat page, waits for the responses, and returns the page's text."""
    browser.open(url)
    idle = "document.getElementById('send').textContent.trim() === 'Send'"
    browser.wait(idle)
    browser.send("What is the capital of France?")
    browser.wait(f"document.getElementById('log').innerText.length > 60 && {idle}")
    browser.send("Tell me a story about a fox and a river.")
    browser.wait(f"document.getElementById('log').innerText.length > 400 && {idle}", 60)
    browser.screenshot(out / "chat_page.png")
    said = browser.run("return document.getElementById('log').innerText").splitlines()
    browser.run("document.getElementById('clear').click()")
    browser.send("Tell me a long story.")
    browser.wait("document.getElementById('send').textContent.trim() === 'Stop'")
    browser.run("document.getElementById('send').click()")
    browser.wait(idle)
    severe = [entry for entry in said if "error" in entry.lower()]
    if severe:
        raise RuntimeError(f"the page shows an error: {severe}")
    return [line for line in said if line.strip()]


def main() -> int:
    """Tries the chat page in a browser and prints the page's text. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    url = f"http://127.0.0.1:{DEFAULT_SERVER_PORT}"
    parser.add_argument("--url", default=url, help="URL of the running server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("output"), help="folder for the screenshot")
    parser.add_argument("--size", default="900,760", help="window size (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile, arguments.size)
        try:
            lines = try_page(browser, arguments.url, arguments.out)
        except (TimeoutError, RuntimeError) as error:
            browser.screenshot(arguments.out / "chat_page_failed.png")
            print(f"error: {error}; see {arguments.out / 'chat_page_failed.png'}", file=sys.stderr)
            return 1
        finally:
            browser.close()
    print("\n".join(lines))
    print(f"screenshot: {arguments.out / 'chat_page.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
