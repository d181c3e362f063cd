#!/usr/bin/env python3
"""Uses the web pages of a running server in headless Chromium, as a user would, and takes pictures for the docs.

On the chat page it asks two questions, waits for the streamed answers, and stops a long third answer. Then it sends
requests and opens the page for operators. The program needs Debian's packages ``chromium`` and ``chromium-driver``. The
exit code is 1 if a page does not work as expected.

    python tools/try_chat_page.py --out output
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.config.serving_section import DEFAULT_SERVER_PORT
from tools.browser import Browser, missing_programs

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers, and show how to call it.",
)
IDLE = "document.getElementById('send').classList.contains('primary')"
WIDTH, HEIGHT = 1180, 820
"""Size of the chat page's window in pixels."""
OPERATOR_HEIGHT = 1660
"""Height of the operator page's window in pixels."""
NUM_REQUESTS = 12
"""Number of requests that run while a picture is taken."""


def ask(browser: Browser, text: str) -> None:
    """Types a message and sends it."""
    browser.click("#text")
    browser.type("#text", text)
    browser.press("Enter")


def try_page(browser: Browser, url: str, out: Path) -> list[str]:
    """Asks the questions, takes the picture, stops a long answer, and returns the page's text."""
    browser.open(url)
    browser.wait("document.body.dataset.ready && document.getElementById('state').className === 'ready'")
    for number, question in enumerate(QUESTIONS, 1):
        if number == 1:
            browser.run("const seed = document.getElementById('temperature'); seed.value = 0;"
                        "seed.dispatchEvent(new Event('change'))")  # fmt: skip
        ask(browser, question)
        browser.wait(f"document.querySelectorAll('.assistant .copy').length === {number} && {IDLE}", 120)
    browser.screenshot(out / "chat_page.png")
    said = str(browser.run("return document.getElementById('log').innerText"))
    browser.click("#new")
    ask(browser, "Tell me a long story.")
    browser.wait("document.querySelector('.assistant .body')?.innerText.length > 20", 60)
    browser.click("#send")
    browser.wait(IDLE)
    if errors := browser.run("return [...document.querySelectorAll('.error')].map((each) => each.innerText)"):
        raise RuntimeError(f"the page shows an error: {errors}")
    return [line for line in said.splitlines() if line.strip()]


def send(url: str, number: int) -> None:
    """Sends one request of a small load."""
    body = {"messages": [{"role": "user", "content": f"Count to {number}. " * number}], "max_tokens": 40 + 8 * number}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()


def try_operator_page(browser: Browser, url: str, out: Path) -> str:
    """Opens the page for operators under load, selects a request that has ended, and waits for its timeline.

    Returns the page's explanation of the request's time.
    """
    size = {"width": WIDTH, "height": OPERATOR_HEIGHT}
    browser.command("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        sent = [pool.submit(send, url, number) for number in range(NUM_REQUESTS)]
        browser.open(f"{url}/operator")
        browser.wait("document.body.dataset.ready")
        ended = "[...document.querySelectorAll('#requests td:nth-child(2)')].filter((td) => td.innerText === 'length')"
        browser.wait(f"{ended}.length >= 4", 300)
        browser.run(f"{ended}[0].parentNode.querySelector('.id').click(); scrollTo(0, 0)")
        browser.wait("document.querySelectorAll('#timeline tbody tr').length > 2", 60)
        browser.screenshot(out / "operator_page.png")
        for each in sent:
            each.result()
    return str(browser.run("return document.getElementById('why-text').innerText"))


def main() -> int:
    """Tries the pages in a browser and prints their text. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    url = f"http://127.0.0.1:{DEFAULT_SERVER_PORT}"
    parser.add_argument("--url", default=url, help="URL of the running server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("output"), help="folder for the pictures")
    arguments = parser.parse_args()
    if missing := missing_programs():
        print(f"error: install {' and '.join(missing)} first (Debian: chromium, chromium-driver)", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder), (WIDTH, HEIGHT))
        try:
            lines = try_page(browser, arguments.url, arguments.out)
            lines.append(try_operator_page(browser, arguments.url, arguments.out))
        except (TimeoutError, RuntimeError) as error:
            browser.screenshot(arguments.out / "page_failed.png")
            print(f"error: {error}; see {arguments.out / 'page_failed.png'}", file=sys.stderr)
            return 1
        finally:
            browser.close()
    print("\n".join(lines))
    print(f"pictures: {arguments.out / 'chat_page.png'}, {arguments.out / 'operator_page.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
