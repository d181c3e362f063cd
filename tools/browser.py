"""Controls a headless Chromium over the W3C WebDriver protocol, for tests and pictures of the web pages.

Needs Debian's packages ``chromium`` and ``chromium-driver``.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage", "--no-first-run", "--lang=en-US", "--hide-scrollbars",
]  # fmt: skip
KEYS = {"Enter": "\ue007", "Shift": "\ue008", "Control": "\ue009", "Escape": "\ue00c", "Tab": "\ue004", "Up": "\ue013"}
"""WebDriver's codes of keys that do not type a character."""
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing_programs() -> list[str]:
    """Returns the programs that a browser needs and this machine does not have."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


class Browser:
    """One window of a headless Chromium. Chromium stores its profile and downloads in ``folder``."""

    def __init__(self, folder: Path, size: tuple[int, int] = (1100, 800)) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.downloads = folder / "downloads"
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={size[0]},{size[1]}"]
        options = {"args": flags, "prefs": {"download.default_directory": str(self.downloads)}}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self._wait_for_driver()
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._end_driver()
            raise
        self._base += "/session/" + session["sessionId"]

    def open(self, url: str) -> None:
        """Opens a URL and waits until it has loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *values: object) -> Any:
        """Runs JavaScript and returns its result. The script reads ``values`` as ``arguments``. A promise is awaited.
        """
        return self._call("POST", "/execute/sync", {"script": script, "args": list(values)})

    def wait(self, condition: str, timeout_s: float = 30.0) -> Any:
        """Waits until a JavaScript expression is true, and returns its value. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.run(f"return {condition}")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page never reached: {condition}")
            time.sleep(0.02)
        return found

    def click(self, selector: str) -> None:
        """Clicks an element as a user does. Raises an error if another element covers it."""
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Types into an element. For a file input, ``text`` has the paths of the files, one per line."""
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Presses keys together, in the element with the focus. A key is a name in ``KEYS`` or a character."""
        codes = [KEYS.get(key, key) for key in keys]
        actions = [{"type": "keyDown", "value": code} for code in codes]
        actions += [{"type": "keyUp", "value": code} for code in reversed(codes)]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def command(self, name: str, **parameters: object) -> Any:
        """Sends a command of Chromium's DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def console(self) -> list[str]:
        """Returns the messages in the console since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the window."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        """Ends the browser and its driver."""
        try:
            self._call("DELETE", "")
        finally:
            self._end_driver()

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def _end_driver(self) -> None:
        self._driver.terminate()
        self._driver.wait()

    def _wait_for_driver(self) -> None:
        for _ in range(200):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("chromedriver did not start")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {json.load(error)['value']['message']}") from None
