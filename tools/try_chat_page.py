#!/usr/bin/env python3
"""Uses the chat page of a running server in headless Chromium, as a user would, and takes a picture for the docs.

It asks two questions, waits for the streamed answers, starts a long one and stops it. It needs Debian's packages
``chromium`` and ``chromium-driver``. The exit code is 1 if the page does not work as expected.

    python tools/try_chat_page.py --out output
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_serving.config.sections import DEFAULT_SERVER_PORT
from tools.browser import Browser, missing_programs

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers, and show how to call it.",
)
IDLE = "document.getElementById('send').classList.contains('primary')"
WIDTH, HEIGHT = 1180, 820


def ask(browser: Browser, text: str) -> None:
    """Type a message and send it."""
    browser.click("#text")
    browser.type("#text", text)
    browser.press("Enter")


def try_page(browser: Browser, url: str, out: Path) -> list[str]:
    """Ask the questions, take the picture, stop a long answer, and return the page's text."""
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


def main() -> int:
    """Try the chat page in a browser and print its text. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    url = f"http://127.0.0.1:{DEFAULT_SERVER_PORT}"
    parser.add_argument("--url", default=url, help="URL of the running server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("output"), help="folder for the picture")
    arguments = parser.parse_args()
    if missing := missing_programs():
        print(f"error: install {' and '.join(missing)} first (Debian: chromium, chromium-driver)", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder), (WIDTH, HEIGHT))
        try:
            lines = try_page(browser, arguments.url, arguments.out)
        except (TimeoutError, RuntimeError) as error:
            browser.screenshot(arguments.out / "chat_page_failed.png")
            print(f"error: {error}; see {arguments.out / 'chat_page_failed.png'}", file=sys.stderr)
            return 1
        finally:
            browser.close()
    print("\n".join(lines))
    print(f"picture: {arguments.out / 'chat_page.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
