"""Tests how the chat page renders Markdown, code, tables and LaTeX. No model output becomes active HTML."""

from __future__ import annotations

import pytest

from support.chat_page import ChatPage

pytestmark = pytest.mark.page

ATTACKS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg/onload=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt&colon;window.hacked=1)",
    "[click](data:text/html,<script>opener.hacked=1</script>)",
    "![x](https://example.invalid/track.png)",
    '![x](x"onerror="window.hacked=1)',
    "```<img src=x onerror=window.hacked=1>\ncode\n```",
    "```html\n</code></pre><script>window.hacked = 1</script>\n```",
    "$\\href{javascript:window.hacked=1}{x}$ and $\\htmlData{a=b}{x}$ and $\\includegraphics{https://example.invalid/a}$",
    "$$<img src=x onerror=window.hacked=1>$$",
    '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=window.hacked=1&gt;">',
    "<think><img src=x onerror='window.hacked = 1'></think><b onmouseover=window.hacked=1>x</b>",
    "| a |\n|---|\n| <img src=x onerror=window.hacked=1> |",
    "<form id=log action=https://example.invalid><input name=children></form>",
    "<a href='https://example.invalid' style='position:fixed;inset:0'>all</a>",
]
ACTIVE = (
    "script, img, iframe, svg:not(.katex svg), object, embed, form, style, link, [srcdoc], [style]:not(.katex [style])"
)


def test_output_never_becomes_active(page: ChatPage) -> None:
    for attack in ATTACKS:
        page.click("#new")
        page.shown(f"before\n\n{attack}\n\nafter")
        assert "after" in page.turns()[1][1], attack
        found = page.run(
            "const body = document.querySelector('.assistant .bubble');"
            "for (const one of body.querySelectorAll('*')) one.dispatchEvent(new MouseEvent('mouseover'));"
            "const names = [...body.querySelectorAll('*')].flatMap((one) => one.getAttributeNames());"
            "return [window.hacked ?? null, [...body.querySelectorAll(arguments[0])].map((each) => each.outerHTML),"
            " names.filter((name) => name.startsWith('on')),"
            " [...body.querySelectorAll('a[href]')].map((a) => a.protocol).filter((each) => !/^https?:$/.test(each))]",
            ACTIVE,
        )
        assert found == [None, [], [], []], attack
    page.open()
    assert page.run("return window.hacked ?? null") is None
    assert len(page.titles()) == len(ATTACKS)


def test_a_question_is_shown_as_it_was_typed(page: ChatPage) -> None:
    page.ask("<b>bold</b> **no** $x$", says="ok")
    assert page.turns()[0] == ["user", "<b>bold</b> **no** $x$"]
    assert page.count(".user .bubble *") == 0


def test_the_policy_stops_what_the_page_itself_would_do(page: ChatPage) -> None:
    """Trusted Types and the Content-Security-Policy block dangerous actions even of the page's own scripts."""
    page.expected = ("TrustedHTML", "TrustedScript", "Content Security Policy", "example.invalid")
    script = (
        "const problems = [];"
        "const note = (action) => { try { action(); } catch (error) { problems.push(error.name); } };"
        "note(() => { document.createElement('div').innerHTML = '<b>x</b>'; });"
        "note(() => { setTimeout('window.hacked = 1'); });"
        "const inline = document.createElement('script'); inline.append('window.hacked = 1');"
        "note(() => { document.body.append(inline); });"
        "const other = document.createElement('img'); other.src = 'https://example.invalid/x.png';"
        "document.body.append(other);"
        "return new Promise((resolve) => setTimeout(() => resolve([problems, window.hacked ?? null]), 50))"
    )
    problems, hacked = page.run(script)
    assert (problems[:2], hacked) == (["TypeError", "TypeError"], None)
    assert page.run("return fetch('https://example.invalid/').then(() => 'sent', () => 'refused')") == "refused"


def test_links_open_elsewhere_and_tell_nothing(page: ChatPage) -> None:
    page.shown("See [the page](https://example.invalid/a) and https://example.invalid/b.")
    links = page.run("return [...document.querySelectorAll('.assistant a')].map((a) => [a.href, a.target, a.rel])")
    assert links == [
        ["https://example.invalid/a", "_blank", "noopener noreferrer nofollow"],
        ["https://example.invalid/b", "_blank", "noopener noreferrer nofollow"],
    ]


def test_code_has_colours_and_can_be_copied(page: ChatPage) -> None:
    page.browser.command(
        "Browser.grantPermissions",
        origin=page.server.url,
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    page.shown("Look:\n\n```python\ndef f(x):\n    return '<b>' + x\n```\n")
    assert page.text(".code-head span") == "python"
    assert page.text(".code .hljs-keyword") == "def"
    page.click(".code-head button")
    page.wait("document.querySelector('.code-head button').innerText === 'Copied'")
    assert page.run("return navigator.clipboard.readText()") == "def f(x):\n    return '<b>' + x"


def test_an_answer_can_be_copied_without_its_thinking(page: ChatPage) -> None:
    page.browser.command(
        "Browser.grantPermissions",
        origin=page.server.url,
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    page.shown("<think>hm</think>**four**")
    page.click(".assistant .tools .copy")
    page.wait("navigator.clipboard.readText().then((text) => text === '**four**')")


def test_tables(page: ChatPage) -> None:
    page.shown("| name | size |\n|:---|---:|\n| a | 1 |\n| b | 2 |\n")
    cells = page.run("return [...document.querySelectorAll('.assistant table tr')].map((row) => row.innerText)")
    assert cells == ["name\tsize", "a\t1", "b\t2"]
    assert page.count(".assistant td.right") == 2


@pytest.mark.parametrize(
    ("text", "inline", "block"),
    [("Inline $a^2 + b^2$ and \\(c^2\\).", 2, 0), ("$$\n\\int_0^1 x\\,dx = \\frac{1}{2}\n$$", 0, 1),
     ("\\[\n\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}\n\\]", 0, 1), ("- in a list: \\[ x = 1 \\]", 0, 1),
     ("It costs $5 and then $6.", 0, 0), ("`$x$` is code", 0, 0), ("\\$5 and \\$6", 0, 0)],
)  # fmt: skip
def test_latex(page: ChatPage, text: str, inline: int, block: int) -> None:
    page.shown(text)
    assert page.count(".assistant .math:not(.math-block) .katex") == inline
    assert page.count(".assistant .math-block .katex-display") == block
    assert page.count(".assistant .katex math") == inline + block


def test_the_formulas_have_their_fonts(page: ChatPage) -> None:
    page.shown("$x$")
    assert page.run("return document.fonts.load('16px KaTeX_Math').then((found) => found.length)") > 0


def test_wrong_latex_is_shown_as_text(page: ChatPage) -> None:
    page.shown("$\\frac{1}{$")
    assert page.text(".assistant .math code") == "\\frac{1}{"


def test_lists_quotes_and_headings(page: ChatPage) -> None:
    page.shown("# Title\n\n> said\n\n1. one\n2. two\n\n- *a*\n- ~~b~~\n")
    counts = {tag: page.count(f".assistant {tag}") for tag in ("h1", "blockquote", "ol li", "ul li", "em", "s")}
    assert counts == {"h1": 1, "blockquote": 1, "ol li": 2, "ul li": 2, "em": 1, "s": 1}
